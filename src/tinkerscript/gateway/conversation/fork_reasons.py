"""Why a prompt extends no earlier call, and how an edited history differs from the original.

Invariant: a reason is only a label. Whatever it is, the prompt was rendered whole from the request's
messages, and what was sampled for it trains under that prompt.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tinkerscript.gateway.chat_messages import ChatMessage, calls_key, message_keys, reasoning_of

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


TEMPLATE_REWRITES = "template_rewrites"
"""The model's chat template writes the conversation differently once there are new messages: it strips
reasoning, moves the tools, or ends a turn otherwise than it was sampled."""


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
    TEMPLATE_REWRITES,
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
