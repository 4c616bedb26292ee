"""A client that only fails while others succeed: refused, named to everybody, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from interchange_helpers import collect, new_episodes, until
from interchange_setup import Setup, serving
from tinkerscript.protocol import ClaimEpisodeResponse
from tinkerscript.server.clients import MIN_FAILURES

REASON = "its last 8 attempts failed while others succeeded: task_error: no space left on the device"


async def fail(setup: Setup, claim: ClaimEpisodeResponse) -> None:
    names: dict[str, Any] = {"episode_uuid": claim.episode_uuid, "attempt": claim.attempt}
    failure = {"kind": "task_error", "message": "no space left on the device"}
    await setup.post("/abort_episode", **names, failure=failure)


async def succeed(setup: Setup, times: int) -> None:
    for _ in range(times):
        await setup.end(await setup.claim("good"))


async def test_a_client_that_only_fails_gets_no_more_episodes_and_is_named(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, max_attempts=20) as setup:
        await setup.link.register(new_episodes(*(f"e{n}" for n in range(40))))
        kept = await setup.claim("bad", claim_request_id="r1")
        await fail(setup, await setup.claim("bad"))
        await succeed(setup, 10)
        for _ in range(MIN_FAILURES - 2):
            await fail(setup, await setup.claim("bad"))
        last = await setup.claim("bad")
        setup.link.set_status(engine_status="ENGINE.WEIGHT_SYNCING")
        await setup.link.flush()
        asked = {"client_uuid": "bad", "sends_key": True, "wait_s": 30}
        waiting = asyncio.create_task(setup.post("/claim_episode", 403, **asked))
        await setup.metric_becomes("tinkerscript_waiting_clients", 1)
        await fail(setup, last)
        setup.link.set_status(engine_status="ENGINE.ROLLING")
        for refused in (await waiting, await setup.post("/claim_episode", 403, **asked)):
            assert refused["failure_reason"] == f"client 'bad' is in quarantine: {REASON}"
        assert (await setup.status()).quarantined == {"bad": REASON}
        await until(lambda: f"client 'bad' gets no more episodes for now: {REASON}" in setup.notes)
        again = await setup.claim("bad", claim_request_id="r1")
        assert again.episode_uuid == kept.episode_uuid, "the answer to a request whose reply may be lost"
        await setup.end(kept)
        assert (await setup.claim("bad")).success, "a result ends it"
        await succeed(setup, 28)
        assert len(await collect(setup.link, 39)) == 39
        assert len(setup.notes) == 1


async def test_an_operator_stops_a_client_and_its_episodes_go_to_others(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, max_attempts=1) as setup:
        await setup.link.register(new_episodes("e1", "e2"))
        held = await setup.claim("odd")
        await setup.post("/stop_client", client_uuid="odd")
        refused = await setup.post("/claim_episode", 403, client_uuid="odd", sends_key=True)
        assert refused["failure_reason"] == "client 'odd' is in quarantine: an operator has stopped it"
        assert (await setup.claim("other")).episode_uuid == held.episode_uuid
        assert (await setup.call(held.openai_api_key)).status_code == 409
