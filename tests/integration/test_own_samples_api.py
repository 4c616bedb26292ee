"""Clients that bring their own samples: bulk and copies, who holds what, the latest call, and the batch."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from interchange_helpers import new_episodes
from interchange_setup import Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.limits import EPISODE_BYTES, Totals
from tinkerscript.protocol import NO_EPISODES
from tinkerscript.trainer_link.messages import BatchProgress

TOKENS = {CLIENT_TOKEN: "client-token-of-tests", ADMIN_TOKEN: "admin-token-of-tests"}


def sample(name: str, **more: Any) -> dict[str, Any]:
    return {"episode_uuid": name, "client_uuid": "me", "task_id": f"of {name}", "payload": {"n": name}} | more


async def test_many_are_registered_at_once_each_by_itself(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS, totals=Totals(pool_episodes=3)) as setup:
        setup.http.headers["Authorization"] = f"Bearer {TOKENS[CLIENT_TOKEN]}"
        first = await setup.post("/register_episodes", episodes=[sample("a"), sample("b")])
        assert first == {"success": True, "registered": ["a", "b"], "refused": {}, "retry_after_s": 0}
        mixed = [
            sample("a"),
            sample("b", payload={}),
            sample("c"),
            sample("d"),
            sample("theirs", client_uuid=""),
        ]
        reply = await setup.post("/register_episodes", episodes=mixed)
        assert (reply["success"], reply["registered"]) == (False, ["a", "c"])
        reasons = {
            "b": "other content",
            "d": "holds 3 unfinished episodes",
            "theirs": "admin token",
        }
        assert reply["refused"].keys() == reasons.keys()
        assert all(reason in reply["refused"][name] for name, reason in reasons.items())
        assert reply["retry_after_s"] == 0, "waiting does not help all of them"
        full = await setup.post("/register_episodes", episodes=[sample("d")])
        assert full["retry_after_s"] > 0


async def test_names_of_pools_are_free_and_their_memory_is_not(tmp_path: Path, byte_model: Path) -> None:
    room = Totals(all_pools_bytes=2 * (EPISODE_BYTES + 100))
    async with serving(tmp_path, byte_model, environ=TOKENS, totals=room) as setup:
        setup.http.headers["Authorization"] = f"Bearer {TOKENS[CLIENT_TOKEN]}"
        for name in ("one", "two"):
            await setup.post("/register_episode", **sample(name, client_uuid=name))
        refused = await setup.post("/register_episode", 429, **sample("three", client_uuid="three"))
        assert "the memory of all pools of clients" in refused["failure_reason"]
        await setup.post("/register_episode", **sample("one", client_uuid="one"))
        await setup.link.register(new_episodes("the trainer's"))


async def test_the_copies_of_a_sample_are_registered_together_or_not_at_all(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS, totals=Totals(pool_episodes=3)) as setup:
        setup.http.headers["Authorization"] = f"Bearer {TOKENS[CLIENT_TOKEN]}"
        await setup.post("/register_episode", **sample("b#2", copies=1))
        await setup.post("/register_episode", 409, **sample("b", copies=2))
        await setup.post("/register_episode", 429, **sample("a", copies=3))
        reply = await setup.post(
            "/register_episodes", episodes=[sample("c", copies=3), sample("d", copies=2)]
        )
        assert reply["registered"] == ["d", "d#2"]
        assert reply["refused"].keys() == {"c", "c#2", "c#3"}
        await setup.post("/register_episode", **sample("d", copies=2))
        claimed = [(await setup.claim(pool="me")).episode_uuid for _ in range(4)]
        assert claimed == ["b#2", "d", "d#2", ""]
        too_long = await setup.post("/register_episode", 422, **sample("e" * 199, task_id="t", copies=2))
        assert too_long["failure_reason"] == (
            "episode_uuid: with the number of the last copy, #2, has 201 characters; 1 to 200 are allowed"
        )


async def test_the_latest_call_is_replayed_to_the_claim_and_to_the_admin(
    tmp_path: Path, byte_model: Path
) -> None:
    async with serving(tmp_path, byte_model, environ=TOKENS) as setup:
        await setup.link.register(new_episodes("e", "f"))
        setup.http.headers["Authorization"] = f"Bearer {TOKENS[CLIENT_TOKEN]}"
        claim, other = await setup.claim(), await setup.claim("other")

        async def replay(key: str, **body: Any) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return await setup.http.post("/replay_latest_llm_call", json=body, headers=headers)

        early = await replay(claim.openai_api_key)
        assert (early.status_code, "has no call" in early.text) == (404, True)
        messages = [{"role": "user", "content": "1+1"}]
        headers = {"Authorization": f"Bearer {claim.openai_api_key}"}
        for _ in range(2):
            ask = {"model": "policy", "messages": messages, "return_token_ids": True}
            reply = await setup.http.post("/v1/chat/completions", json=ask, headers=headers)
            message = reply.json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "and?"}]
        for replayed in (
            await replay(claim.openai_api_key),
            await replay(TOKENS[ADMIN_TOKEN], episode_uuid="e"),
        ):
            assert replayed.status_code == 200, replayed.text
            call = replayed.json()
            said = [each["content"] for each in (*call["input"]["messages"], call["output"])]
            assert said == [each["content"] for each in messages[:4]]
            assert call["prompt_token_ids"] == reply.json()["prompt_token_ids"]
            assert call["token_ids"] == reply.json()["choices"][0]["token_ids"]
            assert (call["format"], call["policy_version"]) == ("messages", 4)
        assert (await replay(other.openai_api_key, episode_uuid="e")).status_code == 409
        assert (await replay(TOKENS[CLIENT_TOKEN], episode_uuid="e")).status_code == 403


async def test_a_pool_that_runs_ahead_of_the_trainer_is_held_back(setup: Setup) -> None:
    await setup.post(
        "/register_episodes", episodes=[sample("a"), sample("b"), sample("v", episode_type="eval")]
    )
    await setup.post("/register_episode", **(sample("x") | {"client_uuid": "slow"}))
    assert (await setup.http.get("/get_batch_progress")).json()["collecting"] is False
    batch = BatchProgress(
        label="step 3",
        rule="groups",
        needed=2,
        have=2,
        episodes_ended=8,
        episodes_expected=8,
        groups_ahead={"me": 2, "slow": 1},
    )
    setup.link.set_batch(batch, at_once=True)
    await setup.link.flush()
    progress = (await setup.http.get("/get_batch_progress")).json()
    assert (progress["collecting"], progress["needed"], progress["have"]) == (True, 2, 2)
    assert (progress["groups_ahead"], progress["max_groups_ahead"]) == ({"me": 2, "slow": 1}, 2)
    held = await setup.claim(pool="me", episode_type="train")
    assert held.fail_cause.startswith(NO_EPISODES)
    assert "'me' is 2 groups or more ahead" in held.fail_cause
    assert (await setup.claim(pool="me")).episode_uuid == "v", "evaluations do not wait"
    assert (await setup.claim(pool="slow")).episode_uuid == "x", "nor do pools that are not ahead"
    waiting = asyncio.create_task(setup.claim("w", pool="me", wait_s=20))
    await setup.metric_becomes("tinkerscript_waiting_clients", 1)
    setup.link.set_batch(None, at_once=True)
    assert (await waiting).episode_uuid == "a", "the next batch took them"
