"""The embedded engine behind Tinker's wire protocol, for the unmodified `tinker` SDK.

`wire_server.WIRE_ENDPOINTS` is the table of what is served, `serve_wire` the server. The protocol has no
public specification: it was read from the SDK that `constraints.txt` pins, and a test fails when that moves.
"""
