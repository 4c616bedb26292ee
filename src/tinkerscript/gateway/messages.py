"""Messages in the one form that the gateway works with, and the keys by which it compares them.

A normalised message is a plain dictionary: `role`, `content` (always a string), and where present
`name`, `tool_call_id`, `reasoning_content` and `tool_calls` (OpenAI's form, arguments as a JSON string).
Three more fields are told to no model: `id`, the call that answered an assistant message, where the caller
named it; `instructions`, true for the system message of one request alone; `is_error` of a tool's result.
Two messages are the same exactly if their keys are equal: None equals "", text parts are joined,
tool-call arguments are compared as JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import Any

import msgspec

ChatMessage = dict[str, Any]
"""A normalised message."""

Tool = dict[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

_ORDERED = msgspec.json.Encoder(order="deterministic")


def prompt_key(message: Mapping[str, Any]) -> Hashable:
    """Identity of a message that stands in a prompt as the caller wrote it."""
    return (
        message["role"],
        message["content"],
        message.get("name") or "",
        message.get("tool_call_id") or "",
        message.get("reasoning_content") or "",
        _tool_calls_key(message),
    )


def reply_key(message: Mapping[str, Any]) -> Hashable:
    """Identity of an assistant message that the gateway answered.

    Outer white space, `name` and `reasoning_content` do not count, since many programs do not
    send them back; the session compares reasoning on its own where it is there.
    """
    return ("reply", message["content"].strip(), _tool_calls_key(message))


def tools_key(tools: list[Tool]) -> bytes:
    """Identity of a request's tools: their JSON, whatever the order of keys."""
    return _ORDERED.encode(tools) if tools else b""


def canonical_json(text: str) -> str:
    """JSON text with its keys sorted; the text itself if it is no JSON."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def go_on(before: list[ChatMessage], messages: list[ChatMessage]) -> list[ChatMessage]:
    """A conversation `before`, and what follows. Instructions are for one request: those of `messages`."""
    first = [message for message in messages if message.get("instructions")]
    kept = [message for message in before if not message.get("instructions")]
    return first + kept + messages[len(first) :]


def _tool_calls_key(message: Mapping[str, Any]) -> Hashable:
    calls = message.get("tool_calls")
    if not calls:
        return ()
    return tuple(
        (call.get("id") or "", call["function"]["name"], canonical_json(call["function"]["arguments"]))
        for call in calls
    )
