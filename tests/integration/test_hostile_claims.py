"""What the holder of one claim's key sends: it harms its own claim at most, and a neighbor goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from interchange_helpers import collect, new_episodes
from interchange_setup import Setup, serving
from tinkerscript.limits import FAILED_CALLS, RECORDED_BYTES
from tinkerscript.protocol import ClaimEpisodeResponse
from tinkerscript.rollouts.call import with_messages
from tinkerscript.trainer_link.messages import EpisodeAccepted

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def server(tmp_path: Path, byte_model: Path) -> AsyncIterator[Setup]:
    async with serving(tmp_path, byte_model) as setup:
        yield setup


async def call(server: Setup, key: str, **fields: Any) -> Any:
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1"}]} | fields
    headers = {"Authorization": f"Bearer {key}"}
    return await server.http.post("/v1/chat/completions", json=body, headers=headers)


async def neighbor_works(server: Setup, claim: ClaimEpisodeResponse) -> None:
    """A whole episode beside the hostile one, and the trainer gets it."""
    assert (await call(server, claim.openai_api_key)).status_code == 200
    await server.end(claim)


def ids_of_tools(id_: str) -> list[dict[str, Any]]:
    made = {"id": id_, "type": "function", "function": {"name": "t", "arguments": "{}"}}
    return [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "content": "2", "tool_call_id": id_},
    ]


async def test_the_messages_of_a_request_are_stored_once(server: Setup) -> None:
    await server.link.register(new_episodes("a"))
    claim = await server.claim()
    said = "x" * 3000
    reply = await call(server, claim.openai_api_key, messages=[{"role": "user", "content": said}], n=8)
    assert reply.status_code == 200, reply.text
    await server.end(claim)
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
