"""Decides whether a prompt continues a conversation, and keeps its ids."""
