"""Programs reward single model calls: the blocking client, a plain function of a Runner, the async client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

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


async def blocking_program(url: str) -> None:
    def program() -> None:
        with TinkerScriptClient(url) as client, client.begin_episode() as episode:
            client.end_episode(episode, turns(episode))

    await asyncio.to_thread(program)


async def plain_function(url: str) -> None:
    statistics = await Runner(turns, client=AsyncTinkerScriptClient(url), max_episodes=1).run()
    assert statistics.ended == 1


async def async_program(url: str) -> None:
    """Needs no reward of the whole, and those of an attempt that failed are gone."""
    async with AsyncTinkerScriptClient(url) as client:
        failed = await client.begin_episode()
        with pytest.raises(RequestRefusedError, match="has no call"):
            await failed.reward("last", 1.0)
        await asyncio.to_thread(call, failed, "a")
        await failed.reward("last", 9.0)
        await client.abort_episode(failed, "lost its way")
        async with await client.begin_episode() as episode:
            await asyncio.to_thread(call, episode, "a")
            await episode.reward("last", 0.5)
            second = await asyncio.to_thread(call, episode, "b")
            await client.end_episode(episode, rewards={second: -0.25})


@pytest.mark.parametrize(
    ("program", "reward", "of_calls"),
    [
        (blocking_program, 2.125, [0.5, 0.125, 0.5]),
        (plain_function, 2.125, [0.5, 0.125, 0.5]),
        (async_program, 0.25, [0.5, -0.25]),
    ],
)
async def test_a_program_rewards_its_calls(
    setup: Setup, program: Callable[[str], Awaitable[None]], reward: float, of_calls: list[float]
) -> None:
    await setup.link.register(new_episodes("e"))
    await program(setup.url)
    outcome = (await collect(setup.link, 1))["e"]
    assert isinstance(outcome, EpisodeAccepted)
    assert outcome.reward == reward
    assert [outcome.call_rewards.get(each.call_id, 0.0) for each in outcome.calls] == of_calls
