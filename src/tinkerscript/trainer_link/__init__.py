"""The link between trainer and server."""
