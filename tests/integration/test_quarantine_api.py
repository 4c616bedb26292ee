"""A client that only fails while others succeed: refused, named to everybody, and the run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from interchange_helpers import collect, eventually, new_episodes
from interchange_setup import OUTPUT, Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.protocol import Failure
from tinkerscript.server.clients import MIN_FAILURES

REASON = "its last 8 attempts failed while others succeeded: task_error: no space left on the device"


async def fail_one(setup: Setup, client: str) -> None:
    claim = await setup.claim(client)
    failure = Failure(kind="task_error", message="no space left on the device").model_dump()
    await setup.post(
        "/abort_episode", episode_uuid=claim.episode_uuid, attempt=claim.attempt, failure=failure
    )


async def succeed(setup: Setup, times: int) -> None:
    for _ in range(times):
        claim = await setup.claim("good")
        uuid = claim.episode_uuid
        await setup.post("/end_episode", episode_uuid=uuid, attempt=claim.attempt, workflow_output=OUTPUT)


async def told(setup: Setup, note: str) -> bool:
    return note in setup.notes


async def test_a_client_that_only_fails_gets_no_more_episodes_and_is_named(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, max_attempts=20) as setup:
        await setup.link.register(new_episodes(*(f"e{n}" for n in range(40))))
        kept = await setup.claim("bad", claim_request_id="r1")
        await fail_one(setup, "bad")
        await succeed(setup, 10)
        for _ in range(MIN_FAILURES - 1):
            await fail_one(setup, "bad")
        refused = await setup.post("/claim_episode", 403, client_uuid="bad", sends_key=True, wait_s=30)
        assert refused["failure_reason"] == f"client 'bad' is in quarantine: {REASON}"
        assert (await setup.status()).quarantined == {"bad": REASON}
        await eventually(lambda: told(setup, f"client 'bad' gets no more episodes for now: {REASON}"))
        again = await setup.claim("bad", claim_request_id="r1")
        assert again.episode_uuid == kept.episode_uuid, "the answer to a request whose reply may be lost"
        end = {"attempt": kept.attempt, "workflow_output": OUTPUT}
        await setup.post("/end_episode", episode_uuid=kept.episode_uuid, **end)
        assert (await setup.claim("bad")).success, "a result ends it"
        await succeed(setup, 28)
        assert len(await collect(setup.link, 39)) == 39
        assert len(setup.notes) == 1


async def test_a_client_that_waits_is_refused_when_it_is_quarantined(
    tmp_path: Path, byte_model: Path
) -> None:
    """One with a token of its own: under any uuid."""
    environ = {CLIENT_TOKEN: "c" * 20, ADMIN_TOKEN: "a" * 20, "ITS_TOKEN": "t" * 20}
    clients = [{"name": "site", "token_env": "ITS_TOKEN"}]
    async with (
        serving(tmp_path, byte_model, environ=environ, max_attempts=20, clients=clients) as setup,
        httpx.AsyncClient(base_url=setup.url, headers={"Authorization": f"Bearer {'t' * 20}"}) as site,
    ):
        setup.http.headers["Authorization"] = f"Bearer {'c' * 20}"
        await setup.link.register(new_episodes(*(f"e{n}" for n in range(8 + 10))))
        names = [{"client_uuid": f"uuid-{number}", "sends_key": True} for number in range(MIN_FAILURES)]
        claims = [(await site.post("/claim_episode", json=name)).json() for name in names]

        async def fail(claim: dict[str, str]) -> None:
            body = {"client_uuid": claim["client_uuid"], "episode_uuid": claim["episode_uuid"]}
            key = {"Authorization": f"Bearer {claim['openai_api_key']}"}
            (await site.post("/abort_episode", json=body, headers=key)).raise_for_status()

        await fail(claims[0])
        await succeed(setup, 10)
        setup.link.set_status(engine_status="ENGINE.WEIGHT_SYNCING")
        await setup.link.flush()
        waiting = asyncio.create_task(
            site.post("/claim_episode", json={"client_uuid": "another", "sends_key": True, "wait_s": 30})
        )
        await eventually(lambda: waits(setup))
        for claim in claims[1:]:
            await fail(claim)
        setup.link.set_status(engine_status="ENGINE.ROLLING")
        reply = await waiting
        assert (reply.status_code, reply.json()["failure_reason"]) == (
            403,
            "client 'site/' is in quarantine: its last 8 attempts failed while others succeeded: aborted:",
        )
        assert (await setup.claim("good")).success


async def waits(setup: Setup) -> bool:
    return (await setup.status()).waiting_clients == 1


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
