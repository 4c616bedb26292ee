"""What a run did, for people: one SQLite file in its folder, written by the trainer and read by the page.

The ledger says what the run stands on; the record is for looking at it, and no run depends on it.
"""
