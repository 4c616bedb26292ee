"""Why a prompt extends no earlier call: the causes, and how an edited history is told from the one it was.

Invariant: a cause is only a label. Whatever it says, the prompt behind it was rendered whole from the
request's messages, and what was sampled for it trains under that prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tinkerscript.gateway.messages import ChatMessage, calls_key, message_keys, reasoning_of

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
