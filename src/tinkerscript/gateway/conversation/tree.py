"""Why a prompt extends no earlier call: the causes, and how an edited history is told from the one it was.

Invariant: a cause is only a label. Whatever it says, the prompt behind it was rendered whole from the
request's messages, and what was sampled for it trains under that prompt.

`Turn` and `Node`: a request that found its place in a conversation, and the call that was recorded for it.

Invariant: `Node.stream` is exactly what the model saw and sampled, from the first prompt on.

`IdPrompts`: which recorded call a prompt of ids goes on from.

A text completion has no messages to be found by, so it is found by its ids: it goes on from the longest
stream (prompt and sampled ids) that it starts with, byte for byte; of equal ones from the first that nobody
extended.
A look-up costs one step for each length of stream and one comparison; a claim that never asks pays nothing.
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
from tinkerscript.gateway.conversation import tree as breaks
from tinkerscript.rollouts.call import MatchedBy

NEW_CONVERSATION = "new_conversation"
"""Break: the messages belong to no conversation so far (a sub-agent, an independent call)."""


SAMPLED_AGAIN = "sampled_again"
"""Break: the same messages were asked before (a parallel sample, a retry of an answer that was delivered)."""


NO_NEW_MESSAGES = "no_new_messages"
"""Break: the messages end with the assistant's own reply."""


TOOLS_CHANGED = "tools_changed"
"""Break: the conversation is known, with other tools."""


SYSTEM_CHANGED = "system_changed"
"""Break: the conversation is known, with another system message at its start."""


HISTORY_SHORTENED = "history_shortened"
"""Break: earlier messages were left out, or replaced by fewer (truncation, compaction)."""


TOOL_RESULT_EDITED = "tool_result_edited"
"""Break: the first message that differs is the result of a tool."""


TEXT_DROPPED = "text_dropped"
"""Break: the first message that differs is an answer whose tool calls came back without the text beside."""


REASONING_EDITED = "reasoning_edited"
"""Break: reasoning came back other than it was answered. Reasoning that is left out breaks nothing."""


HISTORY_EDITED = "history_edited"
"""Break: the conversation is known, but a message is not what was sent or answered."""


RENDERER_REFUSED = "renderer_refused"
"""Break: the chat format cannot go on from what was sampled."""


CAUSES = (
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
"""Every value of `Call.break_cause` that a session gives."""


def edit(known: Sequence[ChatMessage], given: Sequence[ChatMessage]) -> str | None:
    """The cause that tells the messages `given` from the conversation `known`; None if none differs.

    Both end at the same answer, or where the shorter one ends. The first difference decides.
    """
    known_keys, given_keys = list(message_keys(known)), list(message_keys(given))
    if _other_system(known, given, known_keys, given_keys):
        return SYSTEM_CHANGED
    for was, now, was_key, now_key in zip(known, given, known_keys, given_keys, strict=False):
        if was_key != now_key:
            return HISTORY_SHORTENED if len(given) < len(known) else _edit_of(was, now)
        if now["role"] == "assistant" and reasoning_of(now) not in ("", reasoning_of(was)):
            return REASONING_EDITED
    return None


def _other_system(
    known: Sequence[ChatMessage],
    given: Sequence[ChatMessage],
    known_keys: list[Hashable],
    given_keys: list[Hashable],
) -> bool:
    """Whether nothing but the system messages at the start differs."""
    known_start, given_start = _system_length(known), _system_length(given)
    known_rest, given_rest = known_keys[known_start:], given_keys[given_start:]
    common = min(len(known_rest), len(given_rest))
    same_start = known_keys[:known_start] == given_keys[:given_start]
    return not same_start and known_rest[:common] == given_rest[:common]


def _edit_of(was: ChatMessage, now: ChatMessage) -> str:
    if was["role"] != now["role"]:
        return HISTORY_EDITED
    if now["role"] == "tool":
        return TOOL_RESULT_EDITED
    if now["role"] == "assistant" and now.get("tool_calls") and not now["content"].strip():
        return TEXT_DROPPED if calls_key(was) == calls_key(now) else HISTORY_EDITED
    return HISTORY_EDITED


def _system_length(messages: Sequence[ChatMessage]) -> int:
    """How many system messages stand at the start."""
    return next((place for place, each in enumerate(messages) if each["role"] != "system"), len(messages))


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
