"""The token buffer: each claim's conversations as token ids, exactly as they were prompted and sampled.

`session` makes prompts; `matching` finds the call that a request continues; `tree` holds the ids;
`fork_reasons` says why a prompt continues no call.
"""
