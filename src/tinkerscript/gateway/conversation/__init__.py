"""The token buffer of a claim: a tree of calls, how a request finds its place in it, and the session."""
