"""Coding agents as they are: each claim runs one in a sandbox of its own, pointed at the claim's model."""
