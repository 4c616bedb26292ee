"""The episodes of a run: the record, the indexes, and the book that keeps them."""
