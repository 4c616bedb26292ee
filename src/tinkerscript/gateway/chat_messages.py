"""Messages in the one form that the gateway works with, and the keys by which it compares them.

A normalized message is a plain dictionary: `role`, `content` (always a string), and where present `name`,
`tool_call_id`, `reasoning_content`, and `tool_calls` (OpenAI's form, arguments as a JSON string). Three more
fields are never rendered: `id`, the call that sampled an assistant message, if the caller named it;
`instructions`, true for the system message of a single request; `is_error` of a tool result.

Two messages are the same if and only if their keys are equal:

- None equals "", and text parts are concatenated (the dialects do both).
- Outer white space of an assistant's message does not count, since many programs strip it. Other messages
  are compared as they are: their author sends them again unchanged.
- Arguments of tool calls are compared as JSON values: key order, white space, escapes, and the spelling of a
  number (`1.0`, `1`) do not count; an empty string is `{}`. Text that is not JSON is compared as text.
- Ids do not count, but a tool result's position among the preceding calls does. (`matching` uses ids to
  choose among equals.)
- Reasoning does not count here; `matching` compares it where it was sent back.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec

ChatMessage = dict[str, Any]
"""A normalized message."""


Tool = dict[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


_ORDERED = msgspec.json.Encoder(order="deterministic")


_SHORT_TEXT = 4096
"""Canonical arguments of texts up to this many characters are cached: every later turn repeats them."""


_SHORT_TEXTS = 1024


def message_keys(messages: Iterable[ChatMessage], before: ChatMessage | None = None) -> Iterator[Hashable]:
    """The key of each message, where the assistant message `before` precedes the first."""
    positions = _call_positions(before) if before else {}
    for message in messages:
        role = message["role"]
        if role == "assistant":
            positions = _call_positions(message) if "tool_calls" in message else {}
            yield reply_key(message)
        else:
            given = message.get("tool_call_id")
            yield (role, message["content"], message.get("name") or "", positions.get(given, given))


def text_size(messages: Iterable[ChatMessage]) -> int:
    """About how many bytes of text the messages have, whether the chat format writes them or not."""
    size = 0
    for message in messages:
        size += len(message["content"] or "")
        if len(message) > 2:  # Besides role and content.
            size += len(message.get("reasoning_content", ""))
            size += sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return size


def reply_key(message: Mapping[str, Any]) -> Hashable:
    """The key of an assistant message, whether sampled or written by the caller."""
    return (message["content"].strip(), calls_key(message))


def calls_key(message: Mapping[str, Any]) -> Hashable:
    """The key of a message's tool calls."""
    calls = message.get("tool_calls")
    if not calls:
        return ()
    return tuple((call["function"]["name"], canonical_json(call["function"]["arguments"])) for call in calls)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a message, stripped for comparison."""
    return (message.get("reasoning_content") or "").strip()


def given_ids(message: Mapping[str, Any]) -> list[str]:
    """The ids of an assistant message: its own, if the dialect has one, and its tool calls'."""
    ids = [call["id"] for call in message.get("tool_calls") or () if call.get("id")]
    return [message["id"], *ids] if message.get("id") else ids


def with_ids_of(reply: ChatMessage, repeated: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """Tool results with the call ids of `reply`, which the caller sent back as `repeated` with others."""
    ours = [call["id"] for call in reply.get("tool_calls") or ()]
    positions = _call_positions(repeated)
    renamed = {id_: ours[position] for id_, position in positions.items() if ours[position] != id_}
    if not renamed:
        return results
    return [
        {**message, "tool_call_id": renamed[message["tool_call_id"]]}
        if message.get("tool_call_id") in renamed
        else message
        for message in results
    ]


def tools_key(tools: list[Tool]) -> bytes:
    """The key of a request's tools: their JSON, with keys in order."""
    return _ORDERED.encode(tools) if tools else b""


def canonical_json(text: str) -> str:
    """The same text for every spelling of a JSON value; the text itself if it is not JSON."""
    return _canonical_short(text) if len(text) <= _SHORT_TEXT else _canonical(text)


def _canonical(text: str) -> str:
    try:
        return json.dumps(_numbers_by_value(json.loads(text or "{}")), sort_keys=True)
    except (ValueError, RecursionError):
        return text


_canonical_short = lru_cache(maxsize=_SHORT_TEXTS)(_canonical)


def joined_parts(parts: Sequence[str]) -> str:
    """Texts with only white space between what they came from, a line each, with the outer white space."""
    parts = [part for part in parts if part.strip()]
    if not parts:
        return ""
    first, last = parts[0], parts[-1]
    lead, trail = first[: len(first) - len(first.lstrip())], last[len(last.rstrip()) :]
    return lead + "\n".join(part.strip() for part in parts) + trail


def is_expressible(name: object, arguments: object) -> bool:
    """Whether OpenAI's form can express a call: a name, and a JSON object of arguments."""
    if not isinstance(name, str) or not name or not is_encodable(name) or not isinstance(arguments, dict):
        return False
    try:
        json.dumps(arguments, allow_nan=False)  # Python parses `NaN`, and 1e999 as infinity.
    except (ValueError, RecursionError):
        return False
    return True


def is_encodable(text: str) -> bool:
    """Whether `text` has no lone surrogates, which JSON escapes can produce."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def continued(history: list[ChatMessage], messages: list[ChatMessage]) -> list[ChatMessage]:
    """`history` followed by `messages`. Instructions apply to one request: only the new ones remain."""
    first = [message for message in messages if message.get("instructions")]
    kept = [message for message in history if not message.get("instructions")]
    return first + kept + messages[len(first) :]


def _numbers_by_value(value: Any) -> Any:
    """Integers for whole numbers: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_numbers_by_value(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _numbers_by_value(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _call_positions(message: ChatMessage) -> dict[str | None, int]:
    """Id of each tool call of an assistant message -> its position."""
    calls = message.get("tool_calls") or ()
    return {call["id"]: position for position, call in enumerate(calls) if call.get("id")}
