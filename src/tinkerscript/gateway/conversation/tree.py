"""The calls of a claim as a tree of token buffers, a prompt's place in it, and why a conversation forked.

Each `Node` stores only the ids that are new since its parent. Invariants: `Node.stream` is exactly what the
model saw and sampled, from the first prompt on; a fork reason is only a label: whatever it is, the prompt was
rendered whole from the request's messages, and what was sampled for it trains under that prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from tinkerscript.gateway.chat_messages import (
    ChatMessage,
    Tool,
    calls_key,
    message_keys,
    reasoning_of,
    tools_key,
)
from tinkerscript.rollouts.call import MatchedBy

NEW_CONVERSATION = "new_conversation"
"""The messages belong to no conversation so far (a subagent, an independent call)."""


SAMPLED_AGAIN = "sampled_again"
"""The same messages were requested before (a parallel sample, a retry after the reply was delivered)."""


NO_NEW_MESSAGES = "no_new_messages"
"""The messages end with the assistant's reply."""


TOOLS_CHANGED = "tools_changed"
"""The conversation is known, with other tools."""


SYSTEM_CHANGED = "system_changed"
"""The conversation is known, with another system message at its start."""


HISTORY_SHORTENED = "history_shortened"
"""Earlier messages were dropped, or replaced by fewer (truncation, compaction)."""


TOOL_RESULT_EDITED = "tool_result_edited"
"""The first message that differs is a tool result."""


TEXT_DROPPED = "text_dropped"
"""The first message that differs is a reply whose tool calls came back without its text."""


REASONING_EDITED = "reasoning_edited"
"""Reasoning came back changed. Dropping reasoning does not fork."""


HISTORY_EDITED = "history_edited"
"""The conversation is known, but a message differs from what was sent or sampled."""


RENDERER_REFUSED = "renderer_refused"
"""The chat format cannot continue from what was sampled."""


FORK_REASONS = (
    NEW_CONVERSATION,
    SAMPLED_AGAIN,
    NO_NEW_MESSAGES,
    TOOLS_CHANGED,
    SYSTEM_CHANGED,
    HISTORY_SHORTENED,
    TOOL_RESULT_EDITED,
    TEXT_DROPPED,
    REASONING_EDITED,
    HISTORY_EDITED,
    RENDERER_REFUSED,
)
"""Every value of `Turn.fork_reason`."""


def edit_reason(known: Sequence[ChatMessage], given: Sequence[ChatMessage]) -> str | None:
    """How the messages `given` differ from the conversation `known`; None if they do not.

    Both end with the same reply, or where the shorter one ends. The first difference decides.
    """
    known_keys, given_keys = list(message_keys(known)), list(message_keys(given))
    if _only_system_differs(known, given, known_keys, given_keys):
        return SYSTEM_CHANGED
    for was, now, was_key, now_key in zip(known, given, known_keys, given_keys, strict=False):
        if was_key != now_key:
            return HISTORY_SHORTENED if len(given) < len(known) else _edit_of_message(was, now)
        if now["role"] == "assistant" and reasoning_of(now) not in ("", reasoning_of(was)):
            return REASONING_EDITED
    return None


def _only_system_differs(
    known: Sequence[ChatMessage],
    given: Sequence[ChatMessage],
    known_keys: list[Hashable],
    given_keys: list[Hashable],
) -> bool:
    """Whether only the system messages at the start differ."""
    known_start, given_start = _system_length(known), _system_length(given)
    known_rest, given_rest = known_keys[known_start:], given_keys[given_start:]
    common = min(len(known_rest), len(given_rest))
    same_start = known_keys[:known_start] == given_keys[:given_start]
    return not same_start and known_rest[:common] == given_rest[:common]


def _edit_of_message(was: ChatMessage, now: ChatMessage) -> str:
    if was["role"] != now["role"]:
        return HISTORY_EDITED
    if now["role"] == "tool":
        return TOOL_RESULT_EDITED
    if now["role"] == "assistant" and now.get("tool_calls") and not now["content"].strip():
        return TEXT_DROPPED if calls_key(was) == calls_key(now) else HISTORY_EDITED
    return HISTORY_EDITED


def _system_length(messages: Sequence[ChatMessage]) -> int:
    """How many system messages the conversation starts with."""
    return next((index for index, each in enumerate(messages) if each["role"] != "system"), len(messages))


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
