"""`/record_transcript` over a real server: what a claim leaves is in the ledger, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from interchange_helpers import collect, consumed, eventually, new_episodes
from interchange_setup import Setup, serving
from run_ledger import ask, dictionaries
from tinkerscript.ledger.compression import unpacked
from tinkerscript.server.routes import episodes as route


async def send(setup: Setup, key: str, body: bytes = b"told", status: int = 200) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reply = await setup.http.post("/record_transcript", content=body, headers=headers)
    assert reply.status_code == status, reply.text
    return reply


def stored(run_dir: Path) -> list[tuple[str, int, bytes]]:
    """(episode, attempt, transcript), in that order."""
    query = (
        "SELECT uuid, attempt, transcript FROM transcripts JOIN episodes ON sequence = episode ORDER BY 1, 2"
    )
    found, known = ask(run_dir, query), dictionaries(run_dir)
    return [(uuid, attempt, unpacked(data, known)) for uuid, attempt, data in found]


async def test_the_transcripts_of_all_attempts_are_kept_over_a_restart(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model) as setup:
        await setup.link.register(new_episodes("a"))
        first = await setup.claim()
        assert first.max_transcript_bytes == 2**20
        await send(setup, first.openai_api_key, b"draft")
        await send(setup, first.openai_api_key, b"\x00why it failed\xff")
        await setup.post("/abort_episode", episode_uuid="a", attempt=1, failure={"kind": "k"})
        again = await setup.claim()
        await send(setup, again.openai_api_key, b"how it went")
    async with serving(tmp_path, byte_model) as setup:
        setup.keys["a", 2] = again.openai_api_key
        await setup.end(again)
        await setup.link.commit(consumed(await collect(setup.link, 1)))
        assert stored(tmp_path) == [("a", 1, b"\x00why it failed\xff"), ("a", 2, b"how it went")]


async def test_only_the_claim_that_holds_the_lease_leaves_one(setup: Setup) -> None:
    await setup.link.register(new_episodes("a"))
    claim = await setup.claim()
    await send(setup, "", status=401)
    await send(setup, "ts-made-up", status=401)
    await setup.end(claim)
    late = await send(setup, claim.openai_api_key, status=409)
    assert "has ended with its result" in late.json()["failure_reason"]
    assert stored(setup.run_dir) == []


async def test_what_is_too_long_is_refused_unread(setup: Setup) -> None:
    await setup.link.register(new_episodes("a"))
    key = (await setup.claim()).openai_api_key
    for body in (b"x" * (2**20 + 1), b""):
        refused = await send(setup, key, body, status=413)
        assert "this run takes 1 to 1048576" in refused.json()["failure_reason"]

    async def endless() -> AsyncGenerator[bytes]:
        yield b"x"

    headers = {"Authorization": f"Bearer {key}"}
    reply = await setup.http.post("/record_transcript", content=endless(), headers=headers)
    assert reply.status_code == 411
    await send(setup, key, b"x" * 2**20)
    assert [len(data) for *_, data in stored(setup.run_dir)] == [2**20]


async def test_no_more_is_received_at_once_than_there_is_room_for(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "MAX_READING_BYTES", 150)
    await setup.link.register(new_episodes("a", "b"))
    first, second = await setup.claim(), await setup.claim()
    arrives = asyncio.Event()

    async def slowly() -> AsyncGenerator[bytes]:
        yield b"x" * 50
        await arrives.wait()
        yield b"x" * 50

    headers = {"Authorization": f"Bearer {first.openai_api_key}", "Content-Length": "100"}
    receiving = asyncio.create_task(setup.http.post("/record_transcript", content=slowly(), headers=headers))

    async def is_busy() -> bool:
        headers = {"Authorization": f"Bearer {second.openai_api_key}"}
        reply = await setup.http.post("/record_transcript", content=b"y" * 100, headers=headers)
        return reply.status_code == 503 and "retry-after" in reply.headers

    await eventually(is_busy)
    arrives.set()
    assert (await receiving).status_code == 200
    await send(setup, second.openai_api_key, b"y" * 100)
