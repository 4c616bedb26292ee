"""What the tests found of each client; `scripts/clients_table.py` writes `docs/clients.md` from it.

`results.json` holds those of the last recorded run. A run that finds otherwise fails, so the page stays true.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roster import CHAT, MESSAGES, Client
from wiretap import Request

RESULTS = Path(__file__).parent / "results.json"

FOUND: dict[str, dict[str, Any]] = {}
"""Rows of this session, by the client's key."""

_BASIC = {
    CHAT: {"model", "messages", "tools", "stream"},
    MESSAGES: {"model", "messages", "tools", "stream", "system", "max_tokens"},
}


def recorded() -> dict[str, dict[str, Any]]:
    """The rows of the last recorded run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def record(client: Client) -> None:
    """Make this session's row of a client the recorded one."""
    rows = recorded() | {client.key: FOUND[client.key]}
    RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def found(client: Client, version: str, **facts: Any) -> None:
    """Note facts about a client; sets grow."""
    row = FOUND.setdefault(client.key, {"version": version, "works": []})
    for name, fact in facts.items():
        row[name] = sorted({*row.get(name, ()), *fact}) if isinstance(fact, set) else fact


def extra_fields(client: Client, requests: Sequence[Request]) -> set[str]:
    """Fields of the requests' bodies beyond what was asked for."""
    basic = _BASIC.get(client.api, {"model", "input", "instructions", "tools", "stream"})
    return {name for request in requests for name in request.json} - basic


def reasoning_sent(client: Client, requests: Sequence[Request]) -> str:
    """What the client does with the reasoning of earlier answers."""
    last = requests[-1].json
    if last.get("previous_response_id"):
        return "kept by the server"
    if client.api == CHAT:
        sent = any(m.get("reasoning_content") or m.get("reasoning") for m in last["messages"])
    elif client.api == MESSAGES:
        sent = any(
            block.get("type") == "thinking"
            for message in last["messages"]
            if isinstance(message["content"], list)
            for block in message["content"]
        )
    else:
        sent = any(item.get("type") == "reasoning" for item in last["input"])
    return "sent back" if sent else "left out"
