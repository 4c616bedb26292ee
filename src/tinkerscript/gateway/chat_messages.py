"""Messages in the one form that the gateway works with, and the keys by which it compares them.

A normalised message is a plain dictionary: `role`, `content` (always a string), and where present
`name`, `tool_call_id`, `reasoning_content` and `tool_calls` (OpenAI's form, arguments as a JSON string).
Three more fields are told to no model: `id`, the call that answered an assistant message, where the caller
named it; `instructions`, true for the system message of one request alone; `is_error` of a tool's result.

Two messages are the same exactly if their keys are equal:

- None equals "", and text parts are joined as they are (the dialects do both).
- Outer white space of an assistant's message does not count, since many programs strip it. Anyone else's
  message is compared as it is: who wrote it sends it again unchanged.
- Arguments of tool calls are compared as JSON values: order of keys, white space, escapes and the spelling of
  a number (`1.0`, `1`) do not count; nothing at all is `{}`. Text that is no JSON is compared as text.
- Ids do not count, but the place of a tool's result among the calls before it does. (`matching` lets ids
  choose among equals.)
- Reasoning does not count here; `matching` compares it where it was sent back.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

import msgspec

ChatMessage = dict[str, Any]
"""A normalised message."""


Tool = dict[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


_ORDERED = msgspec.json.Encoder(order="deterministic")


_SHORT_TEXT = 4096
"""Characters up to which canonical arguments are kept: every later turn sends them again."""


_SHORT_TEXTS = 1024


def message_keys(messages: Iterable[ChatMessage], before: ChatMessage | None = None) -> Iterator[Hashable]:
    """The identity of each message, in its place after the assistant's message `before`."""
    places = _call_places(before) if before else {}
    for message in messages:
        role = message["role"]
        if role == "assistant":
            places = _call_places(message) if "tool_calls" in message else {}
            yield reply_key(message)
        else:
            given = message.get("tool_call_id")
            yield (role, message["content"], message.get("name") or "", places.get(given, given))


def reply_key(message: Mapping[str, Any]) -> Hashable:
    """Identity of an assistant's message, whoever wrote it."""
    return (message["content"].strip(), calls_key(message))


def calls_key(message: Mapping[str, Any]) -> Hashable:
    """Identity of the tool calls of a message."""
    calls = message.get("tool_calls")
    if not calls:
        return ()
    return tuple((call["function"]["name"], canonical_json(call["function"]["arguments"])) for call in calls)


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning of a message, for comparing: outer white space does not count."""
    return (message.get("reasoning_content") or "").strip()


def given_ids(message: Mapping[str, Any]) -> list[str]:
    """The ids of an assistant's message: its own, where the dialect has one, and its tool calls'."""
    ids = [call["id"] for call in message.get("tool_calls") or () if call.get("id")]
    return [message["id"], *ids] if message.get("id") else ids


def with_ids_of(reply: ChatMessage, repeated: ChatMessage, results: list[ChatMessage]) -> list[ChatMessage]:
    """Tool results for `reply`, which a caller sent back as `repeated` with ids of its own, under our ids."""
    ours = [call["id"] for call in reply.get("tool_calls") or ()]
    renamed = {id_: ours[place] for id_, place in _call_places(repeated).items() if ours[place] != id_}
    if not renamed:
        return results
    return [
        {**message, "tool_call_id": renamed[message["tool_call_id"]]}
        if message.get("tool_call_id") in renamed
        else message
        for message in results
    ]


def tools_key(tools: list[Tool]) -> bytes:
    """Identity of a request's tools: their JSON, whatever the order of keys."""
    return _ORDERED.encode(tools) if tools else b""


def canonical_json(text: str) -> str:
    """One text for all JSON texts of one value; the text itself if it is no JSON."""
    return _canonical_short(text) if len(text) <= _SHORT_TEXT else _canonical(text)


def _canonical(text: str) -> str:
    try:
        return json.dumps(_numbers_by_value(json.loads(text or "{}")), sort_keys=True)
    except (ValueError, RecursionError):
        return text


_canonical_short = lru_cache(maxsize=_SHORT_TEXTS)(_canonical)


def go_on(before: list[ChatMessage], messages: list[ChatMessage]) -> list[ChatMessage]:
    """A conversation `before`, and what follows. Instructions are for one request: those of `messages`."""
    first = [message for message in messages if message.get("instructions")]
    kept = [message for message in before if not message.get("instructions")]
    return first + kept + messages[len(first) :]


def _numbers_by_value(value: Any) -> Any:
    """JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_numbers_by_value(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _numbers_by_value(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _call_places(message: ChatMessage) -> dict[str | None, int]:
    """The place of each tool call of an assistant's message, by its id."""
    calls = message.get("tool_calls") or ()
    return {call["id"]: place for place, call in enumerate(calls) if call.get("id")}
