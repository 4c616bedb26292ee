"""Decide whether a prompt continues a conversation, and keep the ids of each conversation.

`tree` finds the call that a request continues, or the reason why there is none. `session` makes the
prompts of one claim.
"""
