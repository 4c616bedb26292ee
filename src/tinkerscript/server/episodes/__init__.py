"""The episodes of a run: the record and its states, the leases of claims, the indexes, and the book."""
