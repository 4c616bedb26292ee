"""Decide whether a prompt continues a conversation, and keep the ids of each conversation."""
