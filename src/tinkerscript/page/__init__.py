"""The page of a run: what it recorded and what it does now, by API and in a browser.

The API's functions are in modules by place: `overview`, `curves`, `steps`, `held_out`, `episode_view`,
`token_view`, `findings`, `search`; `tinkerscript show` prints what they return. `web_app` serves them,
`static/` is the page itself.
"""
