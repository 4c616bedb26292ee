"""`Node` and `Turn`: the calls of a claim as a tree of token buffers, and a prompt's place in it.

Each call stores only the ids that are new since its parent. Invariant: `Node.stream` is exactly what the
model saw and sampled, from the first prompt on.
"""

from __future__ import annotations

import msgspec

from tinkerscript.gateway.chat_messages import ChatMessage, Tool, reasoning_of, tools_key
from tinkerscript.rollouts.call import MatchedBy

PROMPT = "prompt"
"""Role of the one message that stands for a prompt given as text or ids. No chat has it."""

ROOT_STATE = 0
"""The trie state before any message."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its place in the tree: what to sample from, and what to record about it."""

    parent: Node | None
    """The call that the prompt extends; None for a fork, whose prompt is rendered whole."""

    prompt: bytes
    """The whole prompt (int32)."""

    new_prompt: bytes
    """The part of it after the parent's prompt and sampled ids (int32)."""

    matched_by: MatchedBy | None = None
    fork_reason: str | None
    """One of `FORK_REASONS`; None if the prompt extends a call, or is the first one of its claim."""

    new_messages: list[ChatMessage]
    tools: list[Tool]
    reply_index: int
    """Index of the reply among the messages of the conversation."""


class Node:
    """One recorded call in the tree of its claim."""

    __slots__ = (
        "call_id",
        "extended",
        "new_messages",
        "new_prompt",
        "parent",
        "pending",
        "reply",
        "reply_index",
        "sampled",
        "state",
        "tools",
        "tools_key",
        "written",
    )

    def __init__(self, turn: Turn, call_id: str, sampled: bytes, reply: ChatMessage) -> None:
        self.call_id = call_id
        self.parent = turn.parent
        self.new_messages = turn.new_messages
        self.new_prompt = turn.new_prompt
        self.sampled = sampled
        self.reply = reply
        self.tools = turn.tools
        self.tools_key = turn.parent.tools_key if turn.parent else tools_key(turn.tools)
        self.reply_index = turn.reply_index
        """Index of the reply among the messages of the conversation."""

        self.written = [
            (index, reasoning_of(message))
            for index, message in enumerate(turn.new_messages)
            if message["role"] == "assistant"
        ]
        """Index and reasoning of assistant messages that the caller wrote; only a root has any."""

        self.state = ROOT_STATE
        """The trie state after the reply; `MessageIndex` sets it."""

        self.extended = False
        """Whether a recorded call continues this one."""

        self.pending = 0
        """Requests in flight that continue this call."""

    def stream(self) -> bytes:
        """The token buffer: the whole prompt and the sampled ids (int32)."""
        parts: list[bytes] = []
        node: Node | None = self
        while node is not None:
            parts += (node.sampled, node.new_prompt)
            node = node.parent
        return b"".join(reversed(parts))

    def messages(self) -> list[ChatMessage]:
        """The whole conversation, the reply included."""
        parts: list[list[ChatMessage]] = []
        node: Node | None = self
        while node is not None:
            parts.append([*node.new_messages, node.reply])
            node = node.parent
        return [message for part in reversed(parts) for message in part]
