"""Several gateway processes: each owns a share of the claims, and all work on the server's one book."""
