"""The embedded engine behind Tinker's wire protocol, for the `tinker` SDK.

`app.wire_app` is the server; the calls are in `session_calls`, `training_calls`, `sampling_calls` and
`rest_calls`. The protocol is not documented by its makers: it is read from the SDK that `constraints.txt`
pins.
"""
