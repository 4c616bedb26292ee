"""`IdPrompts`: which recorded call a prompt of ids goes on from.

A text completion has no messages to be found by, so it is found by its ids: it goes on from the longest
stream (prompt and sampled ids) that it starts with, byte for byte; of equal ones from the first that nobody
extended.
A look-up costs one step for each length of stream and one comparison; a claim that never asks pays nothing.
"""

from __future__ import annotations

from tinkerscript.gateway import breaks
from tinkerscript.gateway.turns import PROMPT, Node

_TAIL = 32
"""Bytes at the end of a stream that it is looked up by."""


class IdPrompts:
    """The recorded calls of one claim, by their ids."""

    def __init__(self) -> None:
        self._unread: list[Node] = []
        self._ending: dict[int, dict[bytes, list[Node]]] = {}
        """Calls by the length of their stream in bytes, and by its end."""

        self._asked: set[int] = set()
        """Hashes of the prompts that were given as ids."""

    def add(self, node: Node) -> None:
        """Take in a recorded call."""
        self._unread.append(node)

    def find(self, prompt: bytes) -> Node | None:
        """The call that `prompt` (int32) goes on from."""
        self._read()
        for length in sorted(self._ending, reverse=True):
            if length > len(prompt):
                continue
            nodes = self._ending[length].get(prompt[:length][-_TAIL:], [])
            equal = [node for node in nodes if prompt.startswith(node.stream())]
            if equal:
                fresh = [node for node in equal if not node.extended and not node.pending]
                return (fresh or equal[-1:])[0]
        return None

    def cause(self, prompt: bytes) -> str | None:
        """Why `prompt` goes on from no call; None for the first one of a claim."""
        self._read()
        if not self._ending:
            return None
        return breaks.SAMPLED_AGAIN if hash(prompt) in self._asked else breaks.NEW_CONVERSATION

    def _read(self) -> None:
        for node in self._unread:
            stream = node.stream()
            self._ending.setdefault(len(stream), {}).setdefault(stream[-_TAIL:], []).append(node)
            if node.new_messages and node.new_messages[0]["role"] == PROMPT:
                self._asked.add(hash(stream[: len(stream) - len(node.sampled)]))
        self._unread.clear()
