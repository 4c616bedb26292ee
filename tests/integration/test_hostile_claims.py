"""What the holder of one claim's key sends: it harms its own claim at most, and a neighbor goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import poisoned_ledger
from interchange_helpers import collect, consumed, new_episodes
from interchange_setup import Setup, serving
from tinkerscript.limits import FAILED_CALLS, RECORDED_BYTES
from tinkerscript.protocol import ClaimEpisodeResponse
from tinkerscript.rollouts.call import with_messages
from tinkerscript.trainer_link.framing import MAX_MESSAGE_BYTES
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def server(tmp_path: Path, byte_model: Path) -> AsyncIterator[Setup]:
    async with serving(tmp_path, byte_model) as setup:
        yield setup


async def call(server: Setup, key: str, **fields: Any) -> Any:
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1"}]} | fields
    headers = {"Authorization": f"Bearer {key}"}
    return await server.http.post("/v1/chat/completions", json=body, headers=headers)


async def end(server: Setup, claim: ClaimEpisodeResponse) -> None:
    await server.end(claim)


async def neighbor_works(server: Setup, claim: ClaimEpisodeResponse) -> None:
    """A whole episode beside the hostile one, and the trainer gets it."""
    assert (await call(server, claim.openai_api_key)).status_code == 200
    await end(server, claim)


def ids_of_tools(id_: str) -> list[dict[str, Any]]:
    made = {"id": id_, "type": "function", "function": {"name": "t", "arguments": "{}"}}
    return [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "2", "tool_call_id": id_},
    ]


async def test_an_id_of_megabytes_is_refused_and_not_stored(server: Setup) -> None:
    await server.link.register(new_episodes("a", "b"))
    hostile, honest = await server.claim("hostile"), await server.claim("honest")
    reply = await call(
        server, hostile.openai_api_key, messages=ids_of_tools("i" * 3 * 2**20), n=64, max_tokens=1
    )
    assert reply.status_code == 400
    assert "tool_call_id allows 1024" in reply.json()["error"]["message"]
    await end(server, hostile)
    await neighbor_works(server, honest)
    outcomes = await collect(server.link, 2)
    assert [len(each.calls) for each in outcomes.values() if isinstance(each, EpisodeAccepted)] in (
        [0, 1],
        [1, 0],
    )


async def test_the_messages_of_a_request_are_stored_once(server: Setup) -> None:
    await server.link.register(new_episodes("a"))
    claim = await server.claim()
    said = "x" * 3000
    reply = await call(server, claim.openai_api_key, messages=[{"role": "user", "content": said}], n=8)
    assert reply.status_code == 200, reply.text
    await end(server, claim)
    (outcome,) = (await collect(server.link, 1)).values()
    assert isinstance(outcome, EpisodeAccepted)
    assert [said in each.messages for each in outcome.calls] == [True] + 7 * [False]
    assert all(said in each.messages for each in with_messages(outcome.calls))


async def test_a_claim_records_so_many_bytes_and_no_more(
    server: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.link.register(new_episodes("a", "b"))
    hostile, honest = await server.claim("hostile"), await server.claim("honest")
    answered, messages = 0, ids_of_tools("i" * 1024)
    bound = RECORDED_BYTES._replace(limit=10_000)
    monkeypatch.setattr("tinkerscript.server.claims.RECORDED_BYTES", bound)
    while (reply := await call(server, hostile.openai_api_key, messages=messages)).status_code == 200:
        answered += 1
    assert 0 < answered < 10
    assert reply.status_code == 403
    assert "recorded bytes allows 10000" in reply.json()["error"]["message"]
    await neighbor_works(server, honest)


async def test_failed_calls_are_counted_and_then_refused(
    server: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkerscript.gateway.named_model.FAILED_CALLS", FAILED_CALLS._replace(limit=20))
    await server.link.register(new_episodes("a", "b"))
    hostile, honest = await server.claim("hostile"), await server.claim("honest")
    for _ in range(20):
        assert (await call(server, hostile.openai_api_key, n=0)).status_code == 400
    reply = await call(server, hostile.openai_api_key)
    assert reply.status_code == 403
    assert "failed calls allows 20" in reply.json()["error"]["message"]
    await neighbor_works(server, honest)


async def test_a_result_that_no_message_carries_fails_its_episode_alone(
    tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer stays connected, and the others' results arrive, also those that end afterwards."""
    monkeypatch.setattr("tinkerscript.server.process.open_ledger", poisoned_ledger.opened)
    async with serving(tmp_path, byte_model) as server:
        await server.link.register(new_episodes("poisoned", "b", "c"))
        hostile, honest = await server.claim("hostile"), await server.claim("honest")
        await end(server, hostile)
        await neighbor_works(server, honest)
        outcomes = await collect(server.link, 2)
        failed = outcomes["poisoned"]
        assert isinstance(failed, EpisodeFailed)
        assert "undeliverable" in str(failed.failures)
        assert f"carries {MAX_MESSAGE_BYTES}" in str(failed.failures)
        await server.link.commit(consumed(outcomes))
        await neighbor_works(server, await server.claim("honest"))
        assert isinstance((await collect(server.link, 1))["c"], EpisodeAccepted)
        assert (await server.status()).trainer_connected
        dead = (await server.http.get("/fleet", headers=server.member)).json()["failed"]
        assert [each["episode_uuid"] for each in dead] == ["poisoned"]
        dropped = await server.http.post("/failed_episodes/drop", json={"episode_uuids": ["poisoned"]})
        assert dropped.json()["done"] == ["poisoned"]
