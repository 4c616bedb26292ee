"""Repeated claims, leases during calls, pools, dead letters and limits, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gated_sampler import GatedSampler

from interchange_helpers import (
    FAST,
    collect,
    consumed,
    eventually,
    new_episodes,
    run_config,
    scripted,
    trainer,
    until,
)
from interchange_setup import OUTPUT, Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.limits import FAILED_CALLS, REASON_CHARS, RECORDED_BYTES, Totals
from tinkerscript.protocol import NO_EPISODES, ClaimEpisodeResponse
from tinkerscript.rollouts.call import with_messages
from tinkerscript.server.process import running_server
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

TOKENS = {CLIENT_TOKEN: "client-token-of-tests", ADMIN_TOKEN: "admin-token-of-tests"}
CLIENT = {"Authorization": f"Bearer {TOKENS[CLIENT_TOKEN]}"}
ADMIN = {"Authorization": f"Bearer {TOKENS[ADMIN_TOKEN]}"}


def keys(reply: ClaimEpisodeResponse) -> list[tuple[str, int, str]]:
    return [(claim.episode_uuid, claim.attempt, claim.openai_api_key) for claim in (reply, *reply.more)]


# Repeated claims


async def test_a_repeated_claim_gets_the_same_claims_until_they_are_over(setup: Setup) -> None:
    await setup.link.register(new_episodes("a", "b", "c"))
    first = await setup.claim(claim_request_id="r", max_episodes=2)
    assert keys(await setup.claim(claim_request_id="r", max_episodes=2)) == keys(first)
    assert [name for name, *_ in keys(first)] == ["a", "b"]
    await setup.end(first)
    again = await setup.claim(claim_request_id="r", max_episodes=2)
    assert keys(again) == keys(first)[1:], "only what still holds"
    await setup.end(again)
    over = await setup.claim(claim_request_id="r", wait_s=20)
    assert not over.success
    assert over.fail_cause.startswith(NO_EPISODES)
    assert "answered before" in over.fail_cause
    assert over.retry_after_s > 0
    assert (await setup.claim("other", claim_request_id="r")).episode_uuid == "c", "of another client"


async def test_copies_of_a_claim_that_wait_together_get_the_same_claims(setup: Setup) -> None:
    copies = [
        asyncio.create_task(setup.claim(claim_request_id="r", wait_s=20, max_episodes=2)) for _ in range(3)
    ]
    await setup.metric_becomes("tinkerscript_waiting_clients", 3)
    other = asyncio.create_task(setup.claim("other", claim_request_id="s", wait_s=20))
    await setup.metric_becomes("tinkerscript_waiting_clients", 4)
    await setup.link.register(new_episodes("a", "b", "c"))
    replies = await asyncio.gather(*copies)
    assert keys(replies[0]) == keys(replies[1]) == keys(replies[2])
    claimed = {name for name, *_ in keys(replies[0])}
    mine = await other
    assert mine.success, "no episode lies idle while somebody waits"
    assert mine.episode_uuid not in claimed
    assert await setup.metric("tinkerscript_claims_total") == len(claimed) + 1


async def test_a_client_that_hangs_up_asks_again(setup: Setup) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await setup.http.post(
            "/claim_episode",
            json={"client_uuid": "c", "claim_request_id": "r", "wait_s": 60},
            timeout=0.2,
        )
    await setup.metric_becomes("tinkerscript_waiting_clients", 0)
    await setup.link.register(new_episodes("a"))
    claim = await setup.claim(claim_request_id="r", wait_s=20)
    assert (claim.episode_uuid, claim.attempt) == ("a", 1)


# Leases


async def test_a_claim_does_not_expire_while_its_call_is_answered(tmp_path: Path, byte_model: Path) -> None:
    sampler = GatedSampler()
    async with serving(tmp_path, byte_model, sampler=sampler) as setup:
        await setup.link.register(new_episodes("slow", "canary"))
        claim = await setup.claim(allow_discard_timeout=0.3)
        sampler.go.clear()
        calling = asyncio.create_task(setup.call(claim.openai_api_key))
        await until(lambda: sampler.waiting == 1)
        # The canary's lease is twice as long, began later, and expires: so much time has passed.
        await setup.claim("idle", allow_discard_timeout=0.6)
        await setup.metric_becomes("tinkerscript_expired_claims_total", 1)
        status = await setup.status()
        assert (status.episodes["train"].claimed, status.episodes["train"].registered) == (1, 1)
        sampler.go.set()
        assert (await calling).status_code == 200
        await setup.metric_becomes("tinkerscript_expired_claims_total", 2)
        refused = await setup.call(claim.openai_api_key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "claim_lost")


async def test_a_heartbeat_renews_and_answers(setup: Setup) -> None:
    await setup.link.register(new_episodes("e", "canary"))
    await setup.claim(allow_discard_timeout=0.5)
    body = {"client_uuid": "c", "episode_uuid": "e", "attempt": 1}

    async def beat_until_the_canary_expired() -> bool:
        reply = await setup.post("/heartbeat_episode", **body)
        assert (reply["can_continue"], reply["policy_version"]) == (True, 0)
        return await setup.metric("tinkerscript_expired_claims_total") == 1

    await setup.claim("idle", allow_discard_timeout=1.0)
    await eventually(beat_until_the_canary_expired)
    assert (await setup.post("/heartbeat_episode", **body))["can_continue"] is True, "it was the canary"
    await setup.post("/heartbeat_episode", 401, client_uuid="c", episode_uuid="e")


# Pools


async def test_a_client_registers_into_its_own_pool_and_nowhere_else(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS, totals=Totals(pool_episodes=2)) as setup:

        async def register(status: int, headers: dict[str, str] = CLIENT, **body: Any) -> httpx.Response:
            reply = await setup.http.post("/register_episode", json=body, headers=headers)
            assert reply.status_code == status, reply.text
            return reply

        await register(401, {}, episode_uuid="x", client_uuid="me")
        await register(403, episode_uuid="x")
        await register(403, episode_uuid="x", client_uuid="me", group_id="you/task")
        await register(422, episode_uuid="x", client_uuid="me/you")
        await register(200, ADMIN, episode_uuid="t", task_id="one", group_size=2)
        mine = {"client_uuid": "me", "task_id": "one", "group_size": 4}
        await register(200, episode_uuid="a", **mine)
        await register(200, episode_uuid="b", client_uuid="me", group_id="me/other")
        full = await register(429, episode_uuid="c", **mine)
        assert full.headers["Retry-After"] == "1"
        assert "holds 2 unfinished episodes" in full.json()["failure_reason"]
        await register(200, episode_uuid="a", **mine)
        await register(409, episode_uuid="a", **(mine | {"group_size": 5}))

        async def claim(**body: Any) -> dict[str, Any]:
            body = {"client_uuid": "w", "sends_key": True} | body
            return (await setup.http.post("/claim_episode", json=body, headers=CLIENT)).json()

        assert (await claim())["episode_uuid"] == "t"
        assert (await claim())["success"] is False
        assert (await claim(pool="you"))["success"] is False
        first, second = await claim(pool="me"), await claim(pool="me")
        assert [(each["episode_uuid"], each["group_id"]) for each in (first, second)] == [
            ("a", "me/one"),
            ("b", "me/other"),
        ]
        assert await setup.metric('tinkerscript_pool_episodes{pool="me",state="claimed"}') == 2
        end, key = {"workflow_output": OUTPUT}, {"Authorization": f"Bearer {first['openai_api_key']}"}
        assert (await setup.http.post("/end_episode", json=end, headers=key)).status_code == 200
        outcomes = await collect(setup.link, 1)
        outcome = outcomes["a"]
        assert isinstance(outcome, EpisodeAccepted)
        assert (outcome.pool, outcome.group_id, outcome.group_size) == ("me", "me/one", 4)
        await register(429, episode_uuid="c", **mine)
        await setup.link.commit(consumed(outcomes))
        await register(200, episode_uuid="c", **mine)


# What an operator sees


async def test_failed_episodes_are_listed_retried_and_dropped(tmp_path: Path, byte_model: Path) -> None:
    config = run_config(byte_model, max_attempts=1)
    async with (
        running_server(config, tmp_path, environ={}, times=FAST) as (info, _),
        httpx.AsyncClient(base_url=info.url) as http,
    ):
        async with trainer(info.link_address) as link:
            await link.register(new_episodes("a", "b"))
        setup = Setup(http, link, info.url, tmp_path, scripted())
        await setup.post("/register_episode", episode_uuid="p", client_uuid="mine")
        claims = [await setup.claim(pool=pool) for pool in ("", "", "mine")]
        shown = await http.post("/get_episode_buffer", json={"limit": 2})
        assert not any(claim.openai_api_key in shown.text for claim in claims)
        (rest,) = (await setup.post("/get_episode_buffer", after=shown.json()["next"]))["buffer"]
        assert (rest["episode_uuid"], rest["episode_status"], rest["client_uuid"]) == ("p", "claimed", "c")
        for name in ("a", "b", "p"):
            await setup.post("/abort_episode", episode_uuid=name, attempt=1, failure={"kind": "boom"})
        letters = (await http.get("/failed_episodes", params={"limit": 2})).json()
        assert [each["episode_uuid"] for each in letters["episodes"]] == ["a", "b"]
        assert letters["episodes"][0]["failures"][0]["kind"] == "boom"
        rest = (await http.get("/failed_episodes", params={"after": letters["next"]})).json()
        assert ([each["episode_uuid"] for each in rest["episodes"]], rest["next"]) == (["p"], None)
        waiting = asyncio.create_task(setup.claim("d", wait_s=20))
        retried = await setup.post("/failed_episodes/retry", episode_uuids=["a", "nobody"])
        assert (retried["done"], "'nobody'" in retried["refused"]["nobody"]) == (["a"], True)
        again = await waiting
        assert (again.episode_uuid, again.attempt) == ("a", 2), "somebody who waits gets it"
        dropped = await setup.post("/failed_episodes/drop", episode_uuids=["b", "p"])
        assert (dropped["done"], "its group waits" in dropped["refused"]["b"]) == (["p"], True)
        await setup.end(again)
    async with serving(tmp_path, byte_model, max_attempts=1) as setup:
        found = await collect(setup.link, 2)
        assert isinstance(found["a"], EpisodeAccepted)
        assert found["a"].retries[0]["kind"] == "boom", "failures are kept over a retry"
        assert isinstance(found["b"], EpisodeFailed)

        async def reason() -> str:
            return (await setup.post("/failed_episodes/retry", episode_uuids=["b"]))["refused"]["b"]

        assert "was sent to the trainer, which may have used it" in await reason()
        await setup.link.commit(consumed(found))
        assert "has used the failure" in await reason()
        for _ in range(2):
            assert (await setup.post("/failed_episodes/drop", episode_uuids=["b"]))["success"]
        assert (await setup.http.get("/failed_episodes")).json() == {"episodes": [], "next": None}


async def test_an_operators_endpoints_need_the_admin(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS) as setup:
        for method, path in (
            ("POST", "/get_episode_buffer"),
            ("GET", "/failed_episodes"),
            ("POST", "/failed_episodes/retry"),
            ("POST", "/failed_episodes/drop"),
            ("POST", "/update_engine_status"),
            ("POST", "/sync_train_config"),
            ("GET", "/fleet"),
        ):
            body = {"episode_uuids": []} if method == "POST" else None
            assert (await setup.http.request(method, path, json=body)).status_code == 401
            assert (await setup.http.request(method, path, json=body, headers=CLIENT)).status_code == 403
            allowed = await setup.http.request(method, path, json=body, headers=ADMIN)
            assert allowed.status_code in (200, 422)


# Limits


async def test_bodies_and_outputs_have_limits(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, max_reward=1.0) as setup:
        await setup.link.register(new_episodes("e"))
        claim = await setup.claim()

        async def chunks() -> AsyncIterator[bytes]:
            yield b'{"client_uuid": "'
            for _ in range(17):
                yield b"x" * 2**20

        key = {"Authorization": f"Bearer {claim.openai_api_key}", "Content-Type": "application/json"}
        for path in ("/claim_episode", "/v1/chat/completions"):
            for content in (b" " * (2**24 + 1), chunks()):
                reply = await setup.http.post(path, content=content, headers=key)
                assert (reply.status_code, "the limit is 16777216" in reply.text) == (413, True), reply.text
        for status, output, reason in (
            (413, {"reward": 1, "metadata": {"log": "x" * 2**20}}, "workflow_output: has 1"),
            (422, {"reward": [0.5, 0.6]}, "workflow_output.reward: must be a finite number from -1 to 1"),
        ):
            end = {"episode_uuid": "e", "attempt": 1, "workflow_output": output}
            refused = await setup.post("/end_episode", status, **end)
            assert refused["failure_reason"].startswith(reason)
        failure = {"kind": "boom", "message": "x" * 2**20}
        await setup.post("/abort_episode", episode_uuid="e", attempt=1, failure=failure)
        ((kept,),) = [each["failures"] for each in (await setup.post("/get_episode_buffer"))["buffer"]]
        assert kept["message"] == "x" * REASON_CHARS


async def test_calls_of_a_claim_are_limited_in_flight_and_over_a_restart(
    tmp_path: Path, byte_model: Path
) -> None:
    sampler, totals = GatedSampler(), Totals(calls=2)
    async with serving(tmp_path, byte_model, sampler=sampler, totals=totals) as setup:
        await setup.link.register(new_episodes("e", "f"))
        claim, other = await setup.claim(), await setup.claim()
        sampler.go.clear()
        calls = [asyncio.create_task(setup.call(claim.openai_api_key, text)) for text in ("a", "b")]
        await until(lambda: sampler.waiting == 2)
        third = await setup.call(claim.openai_api_key, "c")
        assert (third.status_code, third.headers["Retry-After"]) == (429, "1")
        calls.pop().cancel()
        await until(lambda: sampler.waiting == 1, "the end of the sample whose caller hung up")
        sampler.go.set()
        assert (await calls[0]).status_code == 200
    async with serving(tmp_path, byte_model, totals=totals) as setup:
        assert (await setup.call(claim.openai_api_key)).status_code == 200
        refused = await setup.call(claim.openai_api_key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "claim_limit_exceeded")
        assert "2 model calls" in refused.json()["error"]["message"]
        assert (await setup.call(other.openai_api_key)).status_code == 200, "of this claim alone"
        setup.keys["e", 1] = claim.openai_api_key
        await setup.end(claim)  # Its result still counts.


async def test_bytes_and_failures_of_a_claim_are_limited(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkerscript.server.claims.RECORDED_BYTES", RECORDED_BYTES._replace(limit=10_000))
    monkeypatch.setattr("tinkerscript.gateway.named_model.FAILED_CALLS", FAILED_CALLS._replace(limit=20))
    await setup.link.register(new_episodes("a", "b", "c"))
    large, failing, neighbor = [(await setup.claim()).openai_api_key for _ in range(3)]
    tool = {"id": "i" * 1024, "type": "function", "function": {"name": "t", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "", "tool_calls": [tool]},
        {"role": "tool", "content": "2", "tool_call_id": tool["id"]},
    ]

    async def call(key: str, **fields: Any) -> httpx.Response:
        body = {"model": "policy", "messages": messages} | fields
        headers = {"Authorization": f"Bearer {key}"}
        return await setup.http.post("/v1/chat/completions", json=body, headers=headers)

    answered = 0
    while (reply := await call(large)).status_code == 200:
        answered += 1
    assert 0 < answered < 10
    assert (reply.status_code, "recorded bytes allows 10000" in reply.text) == (403, True), reply.text
    for _ in range(20):
        assert (await call(failing, n=0)).status_code == 400
    reply = await call(failing)
    assert (reply.status_code, "failed calls allows 20" in reply.text) == (403, True), reply.text
    assert (await call(neighbor)).status_code == 200


async def test_the_messages_of_a_request_are_stored_once(setup: Setup) -> None:
    await setup.link.register(new_episodes("a"))
    claim, said = await setup.claim(), "x" * 3000
    body = {"model": "policy", "messages": [{"role": "user", "content": said}], "n": 8}
    headers = {"Authorization": f"Bearer {claim.openai_api_key}"}
    reply = await setup.http.post("/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    await setup.end(claim)
    (outcome,) = (await collect(setup.link, 1)).values()
    assert isinstance(outcome, EpisodeAccepted)
    assert [said in each.messages for each in outcome.calls] == [True] + 7 * [False]
    assert all(said in each.messages for each in with_messages(outcome.calls))


async def test_tokens_of_a_claim_are_limited(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, max_tokens_per_claim=5) as setup:
        await setup.link.register(new_episodes("e"))
        claim = await setup.claim()
        assert (await setup.call(claim.openai_api_key)).json()["usage"]["completion_tokens"] == 3
        assert setup.sampler.requests[-1].max_tokens == 5
        assert (await setup.call(claim.openai_api_key)).status_code == 200
        assert setup.sampler.requests[-1].max_tokens == 2, "no more than the claim has left"
        refused = await setup.call(claim.openai_api_key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "claim_limit_exceeded")
