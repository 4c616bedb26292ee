"""Environments of other libraries, which are extras, as tasks."""
