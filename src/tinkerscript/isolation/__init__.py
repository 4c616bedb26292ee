"""Sandboxes for untrusted programs without Docker, built from Linux namespaces."""
