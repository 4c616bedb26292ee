"""Environments of verifiers 0.4: the rewards, metrics and messages are those of verifiers' own evaluation."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from claims import run_all
from own_packages import SHOUT, SUMS, own_evaluation, scaffold, stand_in_for_uv

from outside_chat import Message, scripted_chat
from tinkerscript.errors import ClaimLostError, ConfigError, WrongTaskError
from tinkerscript.workers.base_task import load_task

LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
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


async def both_ways(environment: str, script: Any, args: dict[str, Any], **own: Any) -> list[tuple[Any, Any]]:
    """verifiers' trace of each episode and our result, which agree in what was asked and in the rewards."""
    async with scripted_chat(script) as server:
        theirs = await own_evaluation(environment, server.url, **args, **own)
        asked, server.asked = server.asked, []
        ours = await run_all(load_task(f"verifiers:{environment}", args), server.url)
    traces = [episode.traces[0] for episode in theirs]
    assert [error for trace in traces for error in trace.errors] == []
    assert told(server.asked) == told(asked)
    assert [output.reward for output in ours] == [trace.reward for trace in traces]
    assert len({output.reward for output in ours}) > 1, "the replies are not all alike"
    return list(zip(traces, ours, strict=True))


@pytest.mark.parametrize(("environment", "script"), [("sums-v1", adder), ("shout-v1", shouter)])
async def test_an_own_package_is_scored_as_verifiers_scores_it(environment: str, script: Any) -> None:
    for trace, output in await both_ways(environment, script, {}, agent=LOCAL):
        assert output.metadata["scores"] == {name: each.value for name, each in trace.rewards.items()}
        assert trace.metrics.items() <= output.log_metrics.items()


async def test_its_openenv_taskset_is_scored_as_verifiers_scores_it(countdown: str) -> None:
    taskset = {"base_url": countdown, "resets": [{"seed": seed} for seed in range(3)]}
    played = await both_ways("openenv", lambda _: '{"count": 2}', {"taskset": taskset}, player=LOCAL)
    for trace, output in played:
        assert output.metadata["scores"] == {"openenv_reward": trace.reward}
        assert output.log_metrics["model_calls"] >= 2


async def test_a_lost_claim_ends_the_episode_at_once() -> None:
    body = {"error": {"message": "the lease expired", "code": "claim_lost"}}
    async with scripted_chat(lambda _: web.json_response(body, status=409)) as server:
        task = load_task("verifiers:sums-v1", {"taskset": {"num_tasks": 1}})
        with pytest.raises(ClaimLostError, match="the lease expired"):
            await run_all(task, server.url)
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
        (output,) = await run_all(task, server.url, task.samples(held_out=False)[:1])
    assert output.metadata["scores"] == {"reward": 0.0, "asked": 0.0}
    assert output.log_metrics["model_calls"] == 1.0


async def test_tasks_are_chosen_by_select_and_a_worker_runs_its_own() -> None:
    few = load_task("verifiers:sums-v1", {"taskset": {"num_tasks": 9}, "select": {"skip": 6}})
    samples = few.samples(held_out=False)
    assert [sample["input"] for sample in samples] == ["6 + 6 =", "7 + 7 =", "8 + 8 ="]
    async with scripted_chat(lambda _: "14") as server:
        (output,) = await run_all(few, server.url, samples[1:2])
        with pytest.raises(WrongTaskError, match="another problem"):
            await run_all(few, server.url, [{**samples[1], "data": {"prompt": "run me"}}])
        with pytest.raises(WrongTaskError, match="no sample '4'"):
            await run_all(few, server.url, [{**samples[1], "id": 4}])
    assert output.reward == 1.0


def test_what_cannot_be_loaded_says_what_helps() -> None:
    with pytest.raises(ConfigError, match=r"needs the module 'no_such_env', which is not installed"):
        load_task("verifiers:no-such-env", {})
    with pytest.raises(ConfigError, match=r"num_task\b"):
        load_task("verifiers:sums-v1", {"taskset": {"num_task": 3}})
    with pytest.raises(ConfigError, match=r"written for the API of verifiers 0\.3"):
        load_task("verifiers:old_api", {})
