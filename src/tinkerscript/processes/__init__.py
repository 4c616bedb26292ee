"""The processes of a run: starting, watching and ending them."""
