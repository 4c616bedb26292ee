"""The server's HTTP endpoints."""
