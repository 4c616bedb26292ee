"""Agent mode: fields that coding agents send whether or not a server honors them, accepted without effect.

Under `/agent` every route of `AGENT_FIELDS` takes the requests of its strict twin, and those with the fields
of the table, which are left out before the request is parsed. Invariants: what is left out is named on the
call (`Call.ignored`) and counted in the alignment report; a field that is in neither format is still refused.

Sources: requests of Claude Code 2.1, Codex CLI 0.169, opencode 1.18 and mini-swe-agent 2.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tinkerscript.errors import GatewayError

AGENT_PREFIX = "/agent"
"""Precedes the path of a route in agent mode: an agent's base URL is `http://HOST/agent/v1`."""

SIDE_MODEL = "side"
"""The name by which an agent asks for the policy where its work does not need it: a title, a summary."""

AGENT_FIELDS: Mapping[str, Sequence[str]] = {
    "/v1/chat/completions": (
        "reasoning_effort",
        "verbosity",
        "service_tier",
        "messages[].cache_control",
        "messages[].content[].cache_control",
        "messages[].provider_specific_fields",
        "messages[].tool_calls[].provider_specific_fields",
        "tools[].cache_control",
    ),
    "/v1/responses": (
        "client_metadata",
        "reasoning",
        "service_tier",
        "text.verbosity",
        "input[].internal_chat_message_metadata_passthrough",
        "input[].phase",
        "tools[].defer_loading",
        "tools[].output_schema",
        "tools[].tools[].defer_loading",
        "tools[].tools[].output_schema",
        "tools[type=image_generation]",
        "tools[type=tool_search]",
        "tools[type=web_search]",
    ),
    "/v1/messages": (
        "context_management",
        "diagnostics",
        "inference_geo",
        "output_config.effort",
        "service_tier",
        "speed",
        "thinking.display",
        "tools[].allowed_callers",
        "tools[].defer_loading",
        "tools[].input_examples",
        "tools[type=web_search_20250305]",
    ),
}
"""Path of a route -> what its requests may have besides. `a.b` is a field of an object, `a[].b` a field of
each element of a list, and `a[type=b]` the elements of a list that have this type. A type of tool is one that
the provider's servers would run: the model is not told of it."""

_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


def without_agent_fields(path: str, body: bytes) -> tuple[bytes, list[str]]:
    """A request to the route `path` without the fields of the table, and the names of those that were set.

    Raises GatewayError 400 for a body that is not JSON.
    """
    try:
        request = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(400, "invalid_json", f"the request body is not valid JSON: {error}") from error
    ignored = [field for field in AGENT_FIELDS[path] if _removed(request, field)]
    return _ENCODER.encode(request), ignored


def _removed(value: Any, field: str) -> bool:
    """Remove a field of the table from `value`, wherever it is set. Returns whether it was."""
    *parents, last = field.split(".")
    places = [value]
    for name in parents:
        places = [inner for place in places for inner in _inside(place, name)]
    name, _, kind = last.removesuffix("]").partition("[type=")
    removed = [_dropped(place, name, kind) if kind else _unset(place, name) for place in places]
    return any(removed)


def _inside(value: Any, name: str) -> Iterator[Any]:
    found = value.get(name.removesuffix("[]")) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if not name.endswith("[]"):
        yield found
    elif isinstance(found, list):
        yield from found  # pyright: ignore[reportUnknownVariableType]


def _unset(value: Any, name: str) -> bool:
    return isinstance(value, dict) and value.pop(name, None) is not None  # pyright: ignore[reportUnknownMemberType]


def _dropped(value: Any, name: str, kind: str) -> bool:
    """Leave out the elements of this type."""
    elements: Any = value.get(name) if isinstance(value, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if not isinstance(elements, list):
        return False
    kept: list[Any] = [each for each in elements if not _is_of(each, kind)]  # pyright: ignore[reportUnknownVariableType]
    value[name], found = kept, len(kept) < len(elements)  # pyright: ignore[reportUnknownArgumentType]
    return found


def _is_of(element: Any, kind: str) -> bool:
    return isinstance(element, dict) and element.get("type") == kind  # pyright: ignore[reportUnknownMemberType]
