"""Environments of verifiers 0.4: the rewards, metrics and messages are those of verifiers' own evaluation."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from claims import run_claim
from own_packages import SHOUT, SUMS, own_evaluation, scaffold, stand_in_for_uv

from outside_chat import Message, scripted_chat
from tinkerscript.errors import ClaimLostError, ConfigError, WrongTaskError
from tinkerscript.workers.base_task import load_task
from tinkerscript.workers.worker import TaskRollout

LOCAL = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
"""verifiers' own evaluation without an account: its chat program, started on this machine."""


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("packages")
    before = list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        scaffold("sums-v1", folder, SUMS)
        scaffold("shout-v1", folder, SHOUT, "--add-tool")
        (folder / "old_api.py").write_text("def load_environment(): ...\n")
        sys.path.insert(0, str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p.startswith(str(folder))))
        patch.setenv("PATH", stand_in_for_uv(folder / "bin"))
        yield
    sys.path[:] = before


def adder(messages: list[Message]) -> str:
    """Right for small numbers."""
    left, _, right = messages[-1]["content"].removesuffix(" =").partition(" + ")
    return str(int(left) + int(right)) if int(left) < 3 else "many"


def shouter(messages: list[Message]) -> str | Message:
    """Asks the tool once, except for bees."""
    word = next(m["content"] for m in messages if m["role"] == "user").removeprefix("Shout ")
    if messages[-1]["role"] == "tool":
        return f"I shout {messages[-1]['content']}!"
    if word == "bee":
        return "BEE"
    call = {"name": "shout_echo", "arguments": json.dumps({"text": word})}
    return {"content": None, "tool_calls": [{"id": "call-1", "type": "function", "function": call}]}


def told(requests: list[tuple[str, list[Message]]]) -> Counter[str]:
    return Counter(json.dumps(messages, sort_keys=True) for _, messages in requests)


@pytest.mark.parametrize(("environment", "script"), [("sums-v1", adder), ("shout-v1", shouter)])
async def test_an_own_package_is_scored_as_verifiers_scores_it(environment: str, script: Any) -> None:
    async with scripted_chat(script) as server:
        theirs = await own_evaluation(environment, server.url, **LOCAL)
        asked, server.asked = server.asked, []
        task = load_task(f"verifiers:{environment}", {})
        samples = task.samples(held_out=False)
        async with TaskRollout({task.task_id: task}) as rollout:
            claims = [run_claim(rollout, task, sample, server.url, n) for n, sample in enumerate(samples)]
            ours = await asyncio.gather(*claims)
    assert [error for episode in theirs for trace in episode.traces for error in trace.errors] == []
    assert told(server.asked) == told(asked)
    traces = [episode.traces[0] for episode in theirs]
    assert [output.reward for output in ours] == [trace.reward for trace in traces]
    assert len({output.reward for output in ours}) > 1, "the replies are not all alike"
    named = [{name: reward.value for name, reward in trace.rewards.items()} for trace in traces]
    assert [output.metadata["scores"] for output in ours] == named
    for output, trace in zip(ours, traces, strict=True):
        assert trace.metrics.items() <= output.log_metrics.items()


def two_at_a_time(messages: list[Message]) -> str:
    return '{"count": 2}'


async def test_its_openenv_taskset_is_scored_as_verifiers_scores_it(countdown: str) -> None:
    taskset = {"base_url": countdown, "resets": [{"seed": seed} for seed in range(3)]}
    task = load_task("verifiers:openenv", {"taskset": taskset})
    samples = task.samples(held_out=False)
    async with scripted_chat(two_at_a_time) as server:
        theirs = await own_evaluation("openenv", server.url, taskset=taskset, player=LOCAL["agent"])
        asked, server.asked = server.asked, []
        async with TaskRollout({task.task_id: task}) as rollout:
            claims = [run_claim(rollout, task, sample, server.url, n) for n, sample in enumerate(samples)]
            ours = await asyncio.gather(*claims)
    assert [error for episode in theirs for error in episode.errors] == []
    assert told(server.asked) == told(asked)
    rewards = [episode.traces[0].reward for episode in theirs]
    assert [output.reward for output in ours] == rewards
    scores = [{"openenv_reward": reward} for reward in rewards]
    assert [output.metadata["scores"] for output in ours] == scores
    assert len(set(rewards)) > 1, "the seeds are not all alike"
    assert min(output.log_metrics["model_calls"] for output in ours) >= 2


async def test_a_lost_claim_ends_the_episode_at_once() -> None:
    body = {"error": {"message": "the lease expired", "code": "claim_lost"}}
    async with scripted_chat(lambda _: web.json_response(body, status=409)) as server:
        task = load_task("verifiers:sums-v1", {})
        async with TaskRollout({task.task_id: task}) as rollout:
            with pytest.raises(ClaimLostError, match="the lease expired"):
                await run_claim(rollout, task, task.samples(held_out=False)[0], server.url)
    assert len(server.asked) == 1


async def test_a_full_context_ends_the_episode_and_what_was_said_is_scored() -> None:
    """As verifiers has it: a budget that is used up, not a crash."""

    def full(messages: list[Message]) -> Any:
        if messages[-1]["role"] != "tool":
            return shouter(messages)
        error = {"message": "5000 tokens do not fit", "code": "context_length_exceeded"}
        return web.json_response({"error": error}, status=400)

    async with scripted_chat(full) as server:
        task = load_task("verifiers:shout-v1", {})
        async with TaskRollout({task.task_id: task}) as rollout:
            output = await run_claim(rollout, task, task.samples(held_out=False)[0], server.url)
    assert output.metadata["scores"] == {"reward": 0.0, "asked": 0.0}
    assert output.log_metrics["model_calls"] == 1.0


async def test_tasks_are_chosen_by_select_and_a_worker_runs_its_own() -> None:
    few = load_task("verifiers:sums-v1", {"taskset": {"num_tasks": 9}, "select": {"skip": 6}})
    samples = few.samples(held_out=False)
    assert [sample["input"] for sample in samples] == ["6 + 6 =", "7 + 7 =", "8 + 8 ="]
    async with scripted_chat(lambda _: "14") as server, TaskRollout({few.task_id: few}) as rollout:
        output = await run_claim(rollout, few, samples[1], server.url)
        with pytest.raises(WrongTaskError, match="another problem"):
            await run_claim(rollout, few, {**samples[1], "data": {"prompt": "run me"}}, server.url)
        with pytest.raises(WrongTaskError, match="no sample '4'"):
            await run_claim(rollout, few, {**samples[1], "id": 4}, server.url)
    assert output.reward == 1.0


def test_what_cannot_be_loaded_says_what_helps() -> None:
    with pytest.raises(ConfigError, match=r"needs the module 'no_such_env', which is not installed"):
        load_task("verifiers:no-such-env", {})
    with pytest.raises(ConfigError, match=r"num_task\b"):
        load_task("verifiers:sums-v1", {"taskset": {"num_task": 3}})
    with pytest.raises(ConfigError, match=r"written for the API of verifiers 0\.3"):
        load_task("verifiers:old_api", {})


async def test_eval_scores_an_environment(tmp_path: Path) -> None:
    async with scripted_chat(adder) as server:
        arguments = ["eval", "verifiers:sums-v1", "--server", server.url, "--log-dir", str(tmp_path)]
        command = [sys.executable, "-m", "tinkerscript", *arguments, "--epochs", "2"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
    assert process.returncode == 0, said
    assert "verifiers:sums-v1: 10 episodes scored, 0 failed" in said.decode()
    (log,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(line["reward"] for line in lines) == 6.0
    assert {line["epoch"] for line in lines} == {0, 1}
