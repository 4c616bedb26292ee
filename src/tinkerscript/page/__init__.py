"""The page of a run: an API and a browser view of its ledger and its live server.

Functions raise NotRecordedError for what a run lacks, and for a malformed query.
"""
