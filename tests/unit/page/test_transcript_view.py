"""Transcripts on the page: read event by event, whatever a client sent."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from made_run import MadeRun
from page_client import page
from tinkerscript.ledger.rows import TranscriptRow
from tinkerscript.page import transcript_view as module
from tinkerscript.page.episode_view import episode_view
from tinkerscript.page.transcript_view import TranscriptView, transcript_view
from written_run import WrittenRun


@pytest.fixture(autouse=True)
def episode(run: WrittenRun) -> None:
    run.episode("e")


@pytest.fixture
def client(run: WrittenRun) -> httpx.AsyncClient:
    return page(run.folder)


def packed(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return zstandard.ZstdCompressor().compress(text)


def send(run: WrittenRun, transcript: bytes, *, attempt: int = 1) -> None:
    """A client sends it for the episode `e`."""
    run.put(TranscriptRow(episode=1, attempt=attempt, transcript=transcript))


def test_events_are_told_in_order_with_their_depth_and_times(run: WrittenRun, tmp_path: Path) -> None:
    send(run, MadeRun(tmp_path / "made").transcript(7, 1.0), attempt=2)
    found = transcript_view(run.reader, "e")
    assert (found.attempt, found.attempts, found.problem, found.next) == (2, [2], None, None)
    assert json.loads(found.store) == {"total": 21}
    told = [(each.kind, each.depth, each.title, each.seconds) for each in found.events]
    assert told == [
        ("span_begin", 0, "solvers", 0.0),
        ("span_begin", 1, "agent react", 0.5),
        ("model", 2, "tinkerbridge/policy", 1.0),
        ("tool", 2, "calculator", 1.5),
        ("store", 2, "/total", 2.0),
        ("sandbox", 2, "exec cat order.json", 2.5),
        ("model", 2, "tinkerbridge/policy", 3.0),
        ("span_begin", 0, "scorers", 4.5),
        ("score", 1, "solved: 1.0", 5.0),
    ]
    parts = {each.kind: {part.label: part.text for part in each.parts} for each in found.events}
    assert parts["tool"] == {"arguments": '{\n "expression": "7 * 3"\n}', "result": "21"}
    assert parts["store"] == {"add /total": "21"}
    assert parts["score"] == {"answer": "21", "explanation": "The order's total must match."}
    assert parts["model"]["reply"] == "That is 21 in all."
    assert parts["model"]["prompt"] == "user: What is due?\nassistant: \ntool: 21\n"
    assert found.events[2].took_s == 1.25
    own = episode_view("run", run.reader, "e")
    assert own.transcripts == [2]


NOT_TRANSCRIPTS = {
    "not compressed": b"<b>garbage</b> \xff\x00",
    "cut off": zstandard.ZstdCompressor().compress(b"{}" * 1000)[:-9],
    "not JSON": packed(b"garbage"),
    "not Unicode": packed({"events": ["\ud800"]}),
    "a list": packed([1, 2]),
    "events are text": packed({"events": "x"}),
    "nested": packed(b'{"store": ' + b"[" * 100_000),
}


@pytest.mark.parametrize("sent", NOT_TRANSCRIPTS.values(), ids=NOT_TRANSCRIPTS.keys())
async def test_what_is_no_transcript_is_named(
    run: WrittenRun, client: httpx.AsyncClient, sent: bytes
) -> None:
    send(run, sent)
    reply = await client.get("/api/episodes/e/transcript")
    assert reply.status_code == 200
    found = TranscriptView.model_validate(reply.json())
    assert found.problem
    assert found.events == []
    assert found.raw


def test_a_bomb_is_not_unpacked(run: WrittenRun) -> None:
    send(run, packed(b" " * (module.TRANSCRIPT_BYTES + 1)))
    found = transcript_view(run.reader, "e")
    most = module.TRANSCRIPT_BYTES
    assert found.problem == f"{most + 1} bytes are packed, more than the limit of {most}"
    assert len(found.raw) <= module.MAX_RAW_CHARS


HOSTILE: list[Any] = [
    *(None, 1, "text", [], [[]], {}),
    *({"event": 5}, {"event": {"a": 1}}, {"event": None}, {"event": "x" * 10_000}),
    {"event": "model", "input": 7, "input_refs": [[0, 10**30], [-5, 2], [None, 1], 3], "output": []},
    {"event": "model", "input_refs": [[0, 9]], "output": {"choices": [1, {"message": 2}], "usage": 3}},
    {"event": "model", "output": {"choices": [{"message": {"content": [1, None, {"text": 5}]}}]}},
    {"event": "model", "output": {"choices": [{"message": {"tool_calls": [1, "a", {"function": []}]}}]}},
    *({"event": "tool", "function": ["f"], "error": 5}, {"event": "score", "score": "C"}),
    *({"event": "store", "changes": [1, {}]}, {"event": "state", "changes": "all"}),
    *({"event": "sandbox", "cmd": {"a": []}}, {"event": "error", "error": "plain"}, {"event": "logger"}),
    *({"event": "info", "timestamp": "yesterday"}, {"event": "info", "timestamp": 10**400}),
    *({"event": "info", "working_time": "long"}, {"event": "info", "working_time": 10**400}),
    {"event": "span_begin", "id": "a", "parent_id": "a", "name": 4},
]


@pytest.mark.parametrize("sent", HOSTILE, ids=[str(n) for n in range(len(HOSTILE))])
async def test_no_event_breaks_the_page(run: WrittenRun, client: httpx.AsyncClient, sent: Any) -> None:
    pool = {"messages": [1, "a", {"role": [], "content": {}}]}
    good = {"event": "info", "data": "still here"}
    send(run, packed({"events": [sent, good], "events_data": pool, "store": sent}))
    reply = await client.get("/api/episodes/e/transcript")
    assert reply.status_code == 200, reply.text
    found = TranscriptView.model_validate(reply.json())
    assert found.problem is None
    assert found.events[-1].parts[0].text == "still here"


async def test_what_is_not_recorded_is_not_found(client: httpx.AsyncClient) -> None:
    for uuid in ("e", "nobody"):
        assert (await client.get(f"/api/episodes/{uuid}/transcript")).status_code == 404


NAMED = "attachment://a"


@pytest.mark.parametrize(
    "event",
    [
        {"event": "info", "data": [NAMED] * 300},
        {"event": "model", "model": [NAMED] * 300, "input": [{"role": "user", "content": [NAMED] * 300}] * 4},
        {"event": "model", "input_refs": [[0, 4]]},
        {"event": "store", "changes": [{"op": "add", "path": NAMED, "value": NAMED}] * 300},
        {"event": "tool", "function": {"name": [NAMED] * 300}, "error": {"message": [NAMED] * 300}},
    ],
    ids=["info", "model", "pooled", "store", "tool"],
)
def test_what_many_places_name_does_not_fill_the_memory(run: WrittenRun, event: dict[str, Any]) -> None:
    """A kilobyte would become gigabytes."""
    pool = {"messages": [{"role": "user", "content": [NAMED] * 300}] * 4}
    transcript = packed({"events": [event], "events_data": pool, "attachments": {"a": "x" * 2**22}})
    assert len(transcript) < 4096
    send(run, transcript)
    tracemalloc.start()
    try:
        found = transcript_view(run.reader, "e")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.problem is None
    assert most < 400 * 2**20
    assert all(len(part.label) <= 200 for part in found.events[0].parts)


def test_what_has_no_room_keeps_its_name(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPANDED_CHARS", 8)
    send(run, packed({"events": [{"event": "info", "data": [NAMED] * 3}], "attachments": {"a": "four"}}))
    (event,) = transcript_view(run.reader, "e").events
    assert json.loads(event.parts[0].text) == ["four", "four", NAMED]
