"""Agent mode drops fields that coding agents send whether or not a server honors them, and records them.

Sources: requests of Claude Code 2.1, Codex CLI 0.169, opencode 1.18 and mini-swe-agent 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from tinkerscript.errors import GatewayError

AGENT_PREFIX = "/agent"  # An agent's base URL is `http://HOST/agent/v1`.
SIDE_MODEL = "side"  # For side tasks, such as a title.
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
"""`a.b` is a field of an object, `a[].b` of each element of a list; `a[type=b]` is the elements of this type,
tools that would run on the provider's servers, so the model does not see them.
"""

_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


def without_agent_fields(path: str, body: bytes) -> tuple[bytes, list[str]]:
    try:
        request = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(400, "invalid_json", f"the request body is not valid JSON: {error}") from error
    ignored = [field for field in AGENT_FIELDS[path] if _remove(request, field.split("."))]
    return _ENCODER.encode(request), ignored


def _remove(value: Any, path: Sequence[str]) -> bool:
    if not isinstance(value, dict):
        return False
    fields = cast("dict[str, Any]", value)
    name, is_list, kind = path[0].removesuffix("]").partition("[")
    found: Any = fields.get(name)
    if is_list and not isinstance(found, list):
        return False
    if kind:
        fields[name] = [each for each in found if not _has_type(each, kind.removeprefix("type="))]
        return len(fields[name]) < len(found)
    if len(path) == 1:
        return fields.pop(name, None) is not None
    removed = [_remove(each, path[1:]) for each in (found if is_list else [found])]
    return any(removed)


def _has_type(element: Any, kind: str) -> bool:
    return isinstance(element, dict) and cast("dict[str, Any]", element).get("type") == kind
