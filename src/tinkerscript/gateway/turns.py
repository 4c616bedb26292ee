"""`Turn` and `Node`: a request that found its place in a conversation, and the call that was recorded for it.

Invariant: `Node.stream` is exactly what the model saw and sampled, from the first prompt on.
"""

from __future__ import annotations

import msgspec

from tinkerscript.gateway.messages import ChatMessage, Tool, reasoning_of, tools_key
from tinkerscript.rollouts.call import MatchedBy

PROMPT = "prompt"
"""Role of the one message that stands for a prompt which was given as text or ids. No chat has it."""

ROOT = 0
"""The state before any message."""


class Node:
    """One recorded call as the session remembers it."""

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
        """Place of the reply among the conversation's messages."""

        self.written = [
            (place, reasoning_of(message))
            for place, message in enumerate(turn.new_messages)
            if message["role"] == "assistant"
        ]
        """Places and reasoning of assistant messages that the caller wrote; only a new prompt has them."""

        self.state = ROOT
        """Where the path of this conversation stands after the reply; `Conversations` sets it."""

        self.extended = False
        """Whether a recorded call goes on from this one."""

        self.pending = 0
        """Requests in flight that go on from this call."""

    def stream(self) -> bytes:
        """The whole prompt and what was sampled (int32)."""
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


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A request that found its place: what to sample from, and what to record about it."""

    parent: Node | None
    prompt: bytes
    """The whole prompt (int32)."""

    new_prompt: bytes
    """The part of it after the parent's prompt and sampled ids (int32)."""

    matched_by: MatchedBy | None = None
    break_cause: str | None
    new_messages: list[ChatMessage]
    tools: list[Tool]
    reply_index: int
