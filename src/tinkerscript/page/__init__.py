"""The page of a run: an API and a browser view of its ledger and its live server."""
