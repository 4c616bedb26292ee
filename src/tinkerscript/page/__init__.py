"""The page of a run: an API and a browser view of its ledger and its live server.

Each view's module computes its API replies. `web_app` serves them, and `tinkerscript show` prints them.
"""
