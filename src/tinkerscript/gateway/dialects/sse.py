"""Server-sent events with names, which OpenAI Responses and Anthropic Messages send.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()


def named_event(data: dict[str, Any]) -> bytes:
    """One event, named by its data's `type`."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(data) + b"\n\n"
