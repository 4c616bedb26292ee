"""Where episodes and calls outlive the server."""
