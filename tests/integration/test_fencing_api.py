"""Repeated claims, leases during calls, pools, dead letters and limits, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from interchange_helpers import (
    FAST,
    collect,
    consumed,
    eventually,
    new_episode,
    new_episodes,
    run_config,
    trainer,
)
from interchange_setup import OUTPUT, Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.limits import REASON_CHARS, Totals
from tinkerscript.protocol import NO_EPISODES, ClaimEpisodeResponse
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.server.process import running_server
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

TOKENS = {CLIENT_TOKEN: "client-token-of-tests", ADMIN_TOKEN: "admin-token-of-tests"}
CLIENT = {"Authorization": f"Bearer {TOKENS[CLIENT_TOKEN]}"}
ADMIN = {"Authorization": f"Bearer {TOKENS[ADMIN_TOKEN]}"}


def keys(reply: ClaimEpisodeResponse) -> list[tuple[str, int, str]]:
    return [(claim.episode_uuid, claim.attempt, claim.openai_api_key) for claim in (reply, *reply.more)]


def end_of(claim: ClaimEpisodeResponse) -> dict[str, Any]:
    return {
        "client_uuid": claim.client_uuid,
        "episode_uuid": claim.episode_uuid,
        "attempt": claim.attempt,
        "workflow_output": OUTPUT,
    }


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


class Gate:
    """A sampler that answers when it is let."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.requests.append(request)
        self.asked.set()
        await self.go.wait()
        return await self._answer(request)


async def test_a_claim_does_not_expire_while_its_call_is_answered(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model) as setup:
        gate = Gate(setup.sampler.sample)
        address = json.loads((tmp_path / "server.json").read_text())["link_address"]
        async with trainer(address, gate.sample) as link:
            await link.register(new_episodes("slow", "canary"))
            claim = await setup.claim(allow_discard_timeout=0.3)
            await setup.claim("idle", allow_discard_timeout=0.6)
            calling = asyncio.create_task(setup.call(claim.openai_api_key))
            await gate.asked.wait()
            # The canary's lease is twice as long, began later, and expires: so much time has passed.
            await setup.metric_becomes("tinkerscript_expired_claims_total", 1)
            status = await setup.status()
            assert (status.episodes["train"].claimed, status.episodes["train"].registered) == (1, 1)
            gate.go.set()
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
        assert reply["can_continue"] is True, reply
        assert reply["policy_version"] == 0
        return await setup.metric("tinkerscript_expired_claims_total") == 1

    await setup.claim("idle", allow_discard_timeout=1.0)
    await eventually(beat_until_the_canary_expired)
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
        status = await setup.status()
        assert (status.pools["me"].claimed, status.pools[""].claimed) == (2, 1)
        assert (status.active_clients, status.waiting_clients) == (1, 0)
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


async def fail(http: httpx.AsyncClient, *names: str, pool: str = "") -> None:
    """Use up the one attempt of each of these episodes."""
    for name in names:
        asked = await http.post("/claim_episode", json={"client_uuid": "c", "sends_key": True, "pool": pool})
        claim = asked.json()
        assert claim["episode_uuid"] == name
        key = {"Authorization": f"Bearer {claim['openai_api_key']}"}
        body = {"failure": {"kind": "boom"}}
        assert (await http.post("/abort_episode", json=body, headers=key)).status_code == 200


async def test_the_episode_buffer_in_pages_and_without_secrets(setup: Setup) -> None:
    await setup.link.register([new_episode(name) for name in "abcde"])
    claim = await setup.claim()
    reply = await setup.http.post("/get_episode_buffer", json={})
    assert claim.openai_api_key not in reply.text
    assert "ts-" not in reply.text
    buffer = reply.json()["buffer"]
    assert [each["episode_uuid"] for each in buffer] == list("abcde")
    assert (buffer[0]["episode_status"], buffer[0]["client_uuid"], buffer[0]["attempt"]) == (
        "claimed",
        "c",
        1,
    )
    assert buffer[0]["latest_activity_timestamp"] > 1e9
    assert (buffer[1]["episode_status"], buffer[1]["latest_activity_timestamp"]) == ("registered", 0)
    seen, after = list[str](), 0
    while after is not None:
        page = await setup.post("/get_episode_buffer", limit=2, after=after)
        seen += [each["episode_uuid"] for each in page["buffer"]]
        after = page["next"]
    assert seen == list("abcde")


async def test_dead_letters_are_read_retried_and_dropped(tmp_path: Path, byte_model: Path) -> None:
    config = run_config(byte_model, max_attempts=1)
    async with running_server(config, tmp_path, environ={}, times=FAST) as (info, _):  # noqa: SIM117
        async with httpx.AsyncClient(base_url=info.url) as http:
            async with trainer(info.link_address) as link:
                await link.register(new_episodes("a", "b"))
            await http.post("/register_episode", json={"episode_uuid": "p", "client_uuid": "mine"})
            await fail(http, "a", "b")
            await fail(http, "p", pool="mine")
            letters = (await http.get("/failed_episodes", params={"limit": 2})).json()
            assert [each["episode_uuid"] for each in letters["episodes"]] == ["a", "b"]
            assert letters["episodes"][0]["failures"][0]["kind"] == "boom"
            rest = (await http.get("/failed_episodes", params={"after": letters["next"]})).json()
            assert ([each["episode_uuid"] for each in rest["episodes"]], rest["next"]) == (["p"], None)
            waiting = asyncio.create_task(
                http.post("/claim_episode", json={"client_uuid": "d", "wait_s": 20}, timeout=30)
            )
            retried = await http.post("/failed_episodes/retry", json={"episode_uuids": ["a", "nobody"]})
            assert retried.json()["done"] == ["a"]
            assert "'nobody'" in retried.json()["refused"]["nobody"]
            alias = (await waiting).json()["episode_uuid"]
            assert alias.startswith("a~"), "somebody who waits gets it"
            dropped = (await http.post("/failed_episodes/drop", json={"episode_uuids": ["b", "p"]})).json()
            assert dropped["done"] == ["p"]
            assert "its group waits" in dropped["refused"]["b"]
            end = {"client_uuid": "d", "episode_uuid": alias, "workflow_output": OUTPUT}
            assert (await http.post("/end_episode", json=end)).status_code == 200
    async with running_server(config, tmp_path, environ={}, times=FAST) as (info, _):  # noqa: SIM117
        async with httpx.AsyncClient(base_url=info.url) as http, trainer(info.link_address) as link:
            await link.resume([])
            found = await collect(link, 2)
            assert isinstance(found["a"], EpisodeAccepted)
            assert found["a"].retries[0]["kind"] == "boom", "failures are kept over a retry"
            assert isinstance(found["b"], EpisodeFailed)

            async def reason() -> str:
                retry = {"episode_uuids": ["b"]}
                return (await http.post("/failed_episodes/retry", json=retry)).json()["refused"]["b"]

            assert "was sent to the trainer, which may have used it" in await reason(), (
                "it is on its way to a trainer"
            )
            await link.commit(consumed(found))
            assert "has used the failure" in await reason()
            for _ in range(2):
                drop = await http.post("/failed_episodes/drop", json={"episode_uuids": ["b"]})
                assert drop.json()["success"]
            assert (await http.get("/failed_episodes")).json() == {"episodes": [], "next": None}


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

        for content in (b" " * (2**24 + 1), chunks()):
            for path in ("/claim_episode", "/v1/chat/completions"):
                key = {"Authorization": f"Bearer {claim.openai_api_key}", "Content-Type": "application/json"}
                if not isinstance(content, bytes):
                    content = chunks()
                reply = await setup.http.post(path, content=content, headers=key)
                assert reply.status_code == 413, reply.text
                assert "the limit is 16777216" in reply.text
        end = end_of(claim) | {"workflow_output": {"reward": 1, "metadata": {"log": "x" * 2**20}}}
        refused = await setup.post("/end_episode", 413, **end)
        assert refused["failure_reason"].startswith("workflow_output: has 1")
        end = end_of(claim) | {"workflow_output": {"reward": [0.5, 0.6]}}
        refused = await setup.post("/end_episode", 422, **end)
        assert refused["failure_reason"].startswith(
            "workflow_output.reward: must be a finite number from -1 to 1"
        )
        failure = {"kind": "boom", "message": "x" * 2**20}
        abort = {"client_uuid": "c", "episode_uuid": "e", "attempt": 1, "failure": failure}
        await setup.post("/abort_episode", **abort)
        ((kept,),) = [each["failures"] for each in (await setup.post("/get_episode_buffer"))["buffer"]]
        assert kept["message"] == "x" * REASON_CHARS


async def test_calls_of_a_claim_are_limited_also_over_a_restart(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, totals=Totals(calls=2)) as setup:
        await setup.link.register(new_episodes("e", "f"))
        claim = await setup.claim()
        assert (await setup.call(claim.openai_api_key)).status_code == 200
    async with serving(tmp_path, byte_model, totals=Totals(calls=2)) as setup:
        assert (await setup.call(claim.openai_api_key)).status_code == 200
        refused = await setup.call(claim.openai_api_key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "claim_limit_exceeded")
        assert "2 model calls" in refused.json()["error"]["message"]
        other = await setup.claim()
        assert (await setup.call(other.openai_api_key)).status_code == 200, "of this claim alone"
        setup.keys["e", 1] = claim.openai_api_key
        await setup.end(claim)  # Its result still counts.


async def test_calls_in_flight_count_against_the_limit(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, totals=Totals(calls=2)) as setup:
        gate = Gate(setup.sampler.sample)
        address = json.loads((tmp_path / "server.json").read_text())["link_address"]
        async with trainer(address, gate.sample) as link:
            await link.register(new_episodes("e"))
            claim = await setup.claim()
            calls = [asyncio.create_task(setup.call(claim.openai_api_key, text)) for text in ("a", "b")]
            await eventually(lambda: asyncio.sleep(0, len(gate.requests) == 2))
            third = await setup.call(claim.openai_api_key, "c")
            assert (third.status_code, third.headers["Retry-After"]) == (429, "1")
            gate.go.set()
            assert [(await call).status_code for call in calls] == [200, 200]
            assert (await setup.call(claim.openai_api_key, "c")).status_code == 403


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


async def test_one_client_holds_so_many_claims_and_no_more(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, totals=Totals(claims=2)) as setup:
        await setup.link.register(new_episodes(*"abc"))
        first = await setup.claim(max_episodes=5)
        assert len(keys(first)) == 2
        refused = await setup.claim(wait_s=20)
        assert refused.fail_cause.startswith(NO_EPISODES)
        assert "holds 2 claims" in refused.fail_cause
        assert refused.retry_after_s > 0
        await setup.end(first)
        assert (await setup.claim()).episode_uuid == "c"


# Whole paths
