"""The normalized form of messages, and the keys that compare them.

A normalized message has `role`, `content` (always a string), and optionally `name`, `tool_call_id`,
`reasoning_content`, `images` and `tool_calls` (OpenAI's form, arguments as JSON text). Never rendered are
`id`, the call that sampled an assistant message; `instructions`, true for a system message of one request;
and a tool result's `is_error`.

Two messages are the same if and only if their keys are equal:

- None equals "", and text parts are concatenated.
- White space around an assistant's message is ignored, because many programs strip it.
- Arguments are compared as JSON values, with `{}` for an empty string.
- Ids are ignored, except for a tool result's position among the calls before it.
- Reasoning is ignored; `conversation.tree` compares it if it was sent back.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict, cast

import msgspec

ChatMessage = dict[str, Any]


class MessageImage(TypedDict):
    at: int
    """Characters of the content before the image."""

    sha256: str
    """The file's digest, in hex."""

    width: int
    height: int


Tool = dict[str, Any]  # OpenAI's: `{"type": "function", "function": {"name", "description", "parameters"}}`.


_ORDERED = msgspec.json.Encoder(order="deterministic")


_SHORT_TEXT = 4096


_SHORT_TEXTS = 1024


def message_keys(messages: Iterable[ChatMessage], before: ChatMessage | None = None) -> Iterator[Hashable]:
    positions = _call_positions(before) if before else {}
    for message in messages:
        role = message["role"]
        if role == "assistant":
            positions = _call_positions(message) if "tool_calls" in message else {}
            yield reply_key(message)
        else:
            given = message.get("tool_call_id")
            key = (role, message["content"], message.get("name") or "", positions.get(given, given))
            images = tuple((image["at"], image["sha256"]) for image in images_of(message))
            yield (*key, images) if images else key


def images_of(message: ChatMessage) -> list[MessageImage]:
    return message.get("images", [])


def text_size(messages: Iterable[ChatMessage]) -> int:
    size = 0
    for message in messages:
        size += len(message["content"] or "")
        if len(message) > 2:
            size += len(message.get("reasoning_content", ""))
            size += sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    return size


def reply_key(message: Mapping[str, Any]) -> Hashable:
    return (message["content"].strip(), calls_key(message))


def calls_key(message: Mapping[str, Any]) -> Hashable:
    calls = message.get("tool_calls")
    if not calls:
        return ()
    return tuple((call["function"]["name"], canonical_json(call["function"]["arguments"])) for call in calls)


def reasoning_of(message: Mapping[str, Any]) -> str:
    return (message.get("reasoning_content") or "").strip()


def given_ids(message: Mapping[str, Any]) -> list[str]:
    ids = [call["id"] for call in message.get("tool_calls") or () if call.get("id")]
    return [message["id"], *ids] if message.get("id") else ids


def with_ids_of(reply: ChatMessage, repeated: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
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
    return _ORDERED.encode(tools) if tools else b""


def canonical_json(text: str) -> str:
    return _canonical_short(text) if len(text) <= _SHORT_TEXT else _canonical(text)


def _canonical(text: str) -> str:
    try:
        return json.dumps(_numbers_by_value(json.loads(text or "{}")), sort_keys=True)
    except (ValueError, RecursionError):
        return text


_canonical_short = lru_cache(maxsize=_SHORT_TEXTS)(_canonical)


def joined_parts(parts: Sequence[str]) -> str:
    """Join with one newline each, without inner white space and blank texts."""
    parts = [part for part in parts if part.strip()]
    if not parts:
        return ""
    first, last = parts[0], parts[-1]
    lead, trail = first[: len(first) - len(first.lstrip())], last[len(last.rstrip()) :]
    return lead + "\n".join(part.strip() for part in parts) + trail


def is_expressible(name: object, arguments: object) -> bool:
    if not isinstance(name, str) or not name or not is_encodable(name) or not isinstance(arguments, dict):
        return False
    try:
        json.dumps(arguments, allow_nan=False)  # Python parses `NaN`, and 1e999 as infinity.
    except (ValueError, RecursionError):
        return False
    return True


def is_encodable(text: str) -> bool:
    """JSON escapes can produce lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def continued(history: list[ChatMessage], messages: list[ChatMessage]) -> list[ChatMessage]:
    """Append `messages`, and drop earlier requests' instructions."""
    first = [message for message in messages if message.get("instructions")]
    kept = [message for message in history if not message.get("instructions")]
    return first + kept + messages[len(first) :]


def _numbers_by_value(value: Any) -> Any:
    # JavaScript writes 1.0 as 1.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_numbers_by_value(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _numbers_by_value(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _call_positions(message: ChatMessage) -> dict[str | None, int]:
    calls = message.get("tool_calls") or ()
    return {call["id"]: position for position, call in enumerate(calls) if call.get("id")}
