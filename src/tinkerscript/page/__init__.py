"""The page of a run: an API and a browser view of what it recorded and what it does now.

One module per view computes the API's replies: `overview`, `curves`, `steps`, `held_out`, `lines`,
`episode_view`, `token_view`, `transcript_view`. `web_app` serves them, `tinkerscript show` prints them,
and `static/` is the page.
"""
