"""Sandboxes for programs that nobody vouches for, without Docker: namespaces of Linux, and one way out."""
