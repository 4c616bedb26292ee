"""The episodes of a run: the record and its states, the leases, the indexes, and the book."""
