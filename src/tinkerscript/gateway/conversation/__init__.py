"""Whether a prompt continues a conversation, decided here alone, and the ids of each conversation.

`tree` finds the call that a request continues, or says why there is none, and holds the ids exactly as they
were prompted and sampled; `session` makes the prompts of one claim.
"""
