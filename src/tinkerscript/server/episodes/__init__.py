"""The episodes of a run: records, states, leases, indexes, and the book."""
