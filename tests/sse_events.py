"""Server-sent events of the gateway's replies."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event, whose name, if any, is its type; the last may be `[DONE]`."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events: list[Any] = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        *name, data = block.split("\n")
        data = data.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
        assert not name or name == [f"event: {events[-1]['type']}"]
    return events
