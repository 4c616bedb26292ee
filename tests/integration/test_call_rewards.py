"""Programs reward single model calls: the async client, the blocking one, a plain function of a Runner."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from interchange_helpers import collect, new_episodes
from interchange_setup import Setup
from tinkerscript.client import AsyncTinkerScriptClient, Episode, Runner, TinkerScriptClient
from tinkerscript.errors import RequestRefusedError
from tinkerscript.trainer_link.messages import EpisodeAccepted


def call(episode: Episode, text: str) -> str:
    """The id of the reply."""
    reply = httpx.post(
        f"{episode.openai_base_url}/chat/completions",
        json={"model": "policy", "messages": [{"role": "user", "content": text}]},
        headers={"Authorization": f"Bearer {episode.openai_api_key}"},
    )
    return reply.json()["id"]


def turns(episode: Episode) -> float:
    """Three calls, two of which earn something before the end."""
    call(episode, "a")
    episode.reward("last", 0.5)
    second = call(episode, "b")
    call(episode, "c")
    episode.reward(second, 0.125)
    episode.reward("last", 0.25)
    episode.reward("last", 0.25)
    return 1.0


async def rewards(setup: Setup) -> tuple[float, list[float]]:
    """The episode's, and that of each of its calls in order."""
    (outcome,) = (await collect(setup.link, 1)).values()
    assert isinstance(outcome, EpisodeAccepted)
    return outcome.reward, [outcome.call_rewards.get(each.call_id, 0.0) for each in outcome.calls]


EARNED = (2.125, [0.5, 0.125, 0.5])


async def test_a_blocking_program_rewards_its_last_call(setup: Setup) -> None:
    await setup.link.register(new_episodes("e"))

    def program() -> None:
        with TinkerScriptClient(setup.url) as client, client.begin_episode() as episode:
            client.end_episode(episode, turns(episode))

    await asyncio.to_thread(program)
    assert await rewards(setup) == EARNED


async def test_a_plain_function_of_a_runner_rewards_its_last_call(setup: Setup) -> None:
    await setup.link.register(new_episodes("e"))
    statistics = await Runner(turns, client=AsyncTinkerScriptClient(setup.url), max_episodes=1).run()
    assert statistics.ended == 1
    assert await rewards(setup) == EARNED


async def test_an_async_program_needs_no_reward_of_the_whole(setup: Setup) -> None:
    await setup.link.register(new_episodes("e"))
    async with AsyncTinkerScriptClient(setup.url) as client, await client.begin_episode() as episode:
        with pytest.raises(RequestRefusedError, match="has no call"):
            await episode.reward("last", 1.0)
        await asyncio.to_thread(call, episode, "a")
        await episode.reward("last", 0.5)
        second = await asyncio.to_thread(call, episode, "b")
        await client.end_episode(episode, rewards={second: -0.25})
    assert await rewards(setup) == (0.25, [0.5, -0.25])


async def test_the_rewards_of_an_attempt_that_failed_are_gone(setup: Setup) -> None:
    await setup.link.register(new_episodes("e"))
    async with AsyncTinkerScriptClient(setup.url) as client:
        episode = await client.begin_episode()
        await asyncio.to_thread(call, episode, "a")
        await episode.reward("last", 0.5)
        await client.abort_episode(episode, "lost its way")
        again = await client.begin_episode()
        assert again.attempt == 2
        await asyncio.to_thread(call, again, "a")
        await client.end_episode(again, 1.0)
    assert await rewards(setup) == (1.0, [0.0])
