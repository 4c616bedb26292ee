"""An OpenEnv environment on a local server: the rewards are the environment's own."""

from __future__ import annotations

import pytest
from claims import run_all
from countdown_server import start
from openenv import GenericEnvClient

from outside_chat import Message, scripted_chat
from tinkerscript.protocol import total_reward
from tinkerscript.workers.base_task import load_task


def twos(messages: list[Message]) -> str:
    """Takes two at a time, whatever is left."""
    return '{"count": 2}'


def careful(messages: list[Message]) -> str:
    """Says something else first, then takes one at a time: as an object in a code fence, and as a plain
    number."""
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return ["Let me think.", '```json\n{"count": 1}\n```', "1"][min(len(said), 2)]


async def own_rewards(url: str, seed: int, counts: list[int]) -> float:
    """The sum of the rewards that the environment's own client is given for these actions."""
    async with GenericEnvClient(base_url=url) as client:
        await client.reset(seed=seed)
        results = [await client.step({"count": count}) for count in counts]
    assert results[-1].done
    return sum(float(result.reward) for result in results)


async def test_episodes_are_scored_as_the_environment_scores_them(countdown: str) -> None:
    task = load_task(f"openenv:{countdown}", {"size": 6, "sessions": 4})
    expected = [await own_rewards(countdown, seed, [2] * -(-start(seed) // 2)) for seed in range(6)]
    async with scripted_chat(twos) as server:
        ours = await run_all(task, server.url)
    assert [total_reward(output) for output in ours] == pytest.approx(expected)
    assert [output.metadata["scores"]["openenv_reward"] for output in ours] == pytest.approx(expected)
    assert len(set(expected)) > 1, "the seeds are not all alike"
    assert {output.log_metrics["unfinished"] for output in ours} == {0.0}
    system = server.asked[0][1][0]
    assert system["role"] == "system"
    assert '"count"' in system["content"]


async def test_what_is_no_action_is_said_and_plain_values_are_one(countdown: str) -> None:
    task = load_task(f"openenv:{countdown}", {"size": 1})
    left = start(0)
    async with scripted_chat(careful) as server:
        (output,) = await run_all(task, server.url)
    assert output.log_metrics["misread"] == 1.0
    assert output.log_metrics["steps"] == left + 1.0
    assert total_reward(output) == pytest.approx(0.1 * left + 1.0)
    assert server.asked[1][1][-1]["content"].startswith("That is no action")


async def test_an_episode_that_does_not_end_is_cut(countdown: str) -> None:
    task = load_task(f"openenv:{countdown}", {"size": 1, "max_steps": 1})
    async with scripted_chat(lambda _: '{"count": 1}') as server:
        (output,) = await run_all(task, server.url)
    given = {"score/openenv_reward": pytest.approx(0.1), "misread": 0.0}
    assert output.log_metrics == {"steps": 1.0, "unfinished": 1.0, **given}
