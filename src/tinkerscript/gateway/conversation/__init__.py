"""Decides whether a prompt continues a conversation, and keeps the ids of each conversation.

`tree` finds the call that a request continues, or says why there is none, and stores the ids exactly as
they were prompted and sampled. `session` makes the prompts of one claim.
"""
