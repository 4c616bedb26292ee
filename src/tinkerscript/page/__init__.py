"""The page of a run: an API and a browser view of its ledger and its live server.

Each view has a module that computes its API replies. `web_app` serves them, `tinkerscript show` prints them,
and `static/` is the page.
"""
