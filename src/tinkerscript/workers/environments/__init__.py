"""Environments of other libraries as tasks; each imports its library, which is an extra."""
