"""The embedded engine behind Tinker's wire protocol, for the unmodified `tinker` SDK.

The protocol has no public specification: we read it from the SDK that `constraints.txt` pins, and a test
fails when that changes.
"""
