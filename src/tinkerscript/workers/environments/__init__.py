"""Environments of other libraries as tasks. Each imports its library, which is an extra."""
