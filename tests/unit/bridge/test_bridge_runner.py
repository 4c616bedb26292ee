"""Episodes of real Inspect tasks under the persistent eval, with scripted policies."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.scorer import Score, Scorer, Target, match, model_graded_qa
from inspect_ai.solver import Generate, Solver, TaskState, chain, generate, system_message
from inspect_ai.util import SandboxEnvironment, sandboxenv

from bridge_groups import Held, scoring, solving
from bridge_parts import Scripted, said
from inspect_tinker_bridge.episodes import GenerateRequest
from inspect_tinker_bridge.errors import (
    RunnerError,
    SandboxError,
    SelfGradingError,
    TaskFailedError,
)
from inspect_tinker_bridge.runner import RunnerOptions, TaskRunner
from inspect_tinker_bridge.scoring import score_episode
from inspect_tinker_bridge.tasks import load_inspect_task


class Echo:
    """Says the number that the last message asks for."""

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        await asyncio.sleep(0)
        return said(request.messages[-1].text.split()[-1])


SAMPLES = [Sample(input=f"Say {n}", target=str(n), id=n) for n in range(1, 9)]


def numbers(solver: Solver | None = None, scorer: Scorer | Sequence[Scorer] | None = None) -> Task:
    return Task(dataset=list(SAMPLES), solver=solver or generate(), scorer=scorer or match())


@solving
async def raising(state: TaskState, generate: Generate) -> TaskState:
    raise ValueError("the solver broke")


@scoring
async def broken(state: TaskState, target: Target) -> Score:
    raise KeyError("the scorer broke")


async def test_concurrent_episodes_each_get_their_own_answers_and_scores() -> None:
    info = load_inspect_task(numbers, solver=chain(system_message("Obey."), generate()))
    async with TaskRunner(info) as runner:
        outcomes = await asyncio.gather(*(runner.run(SAMPLES[n % 8], Echo()) for n in range(40)))
    assert [outcome.sample_id for outcome in outcomes] == [SAMPLES[n % 8].id for n in range(40)]
    assert [score_episode(outcome).reward for outcome in outcomes] == [1.0] * 40
    assert [message.role for message in outcomes[3].messages] == ["system", "user", "assistant"]
    assert outcomes[3].messages[-1].text == "4"


@pytest.mark.parametrize(
    "args", [{"solver": raising()}, {"scorer": broken()}, {"scorer": [match(), broken()]}]
)
async def test_a_solver_or_scorer_that_raises_is_a_failure_and_the_runner_lives(
    args: dict[str, Solver],
) -> None:
    async with TaskRunner(load_inspect_task(numbers, **args)) as runner:
        for _ in range(2):
            outcome = await runner.run(SAMPLES[0], Echo())
            with pytest.raises(TaskFailedError, match=r"sample 1 failed: .*the (solver|scorer) broke"):
                score_episode(outcome)
            assert "broke" in outcome.traceback


async def test_a_scorer_that_asks_the_policy_is_refused_even_if_it_swallows_the_refusal() -> None:
    @scoring
    async def swallowing(state: TaskState, target: Target) -> Score:
        try:
            await get_model().generate("Is it good?")
        except SelfGradingError:
            return Score(value=1)
        return Score(value=0)

    async with TaskRunner(load_inspect_task(numbers, scorer=swallowing())) as runner:
        with pytest.raises(SelfGradingError, match="model_roles"):
            await runner.run(SAMPLES[0], Echo())


async def test_what_the_policy_raises_comes_back_as_it_is() -> None:
    problem = ConnectionError("the endpoint is gone")
    async with TaskRunner(load_inspect_task(numbers)) as runner:
        with pytest.raises(ConnectionError) as raised:
            await runner.run(SAMPLES[0], Scripted(problem))
        assert raised.value is problem
        assert score_episode(await runner.run(SAMPLES[0], Echo())).reward == 1.0


async def test_closing_with_episodes_running_ends_them_and_restores_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    level, hook, handlers = logging.getLogger().level, sys.excepthook, list(logging.getLogger().handlers)
    policy = Held("1")
    async with TaskRunner(load_inspect_task(numbers)) as runner:
        run = asyncio.create_task(runner.run(SAMPLES[0], policy))
        await policy.asked.wait()
        assert len(list(tmp_path.iterdir())) == 1
        assert (logging.getLogger().level, sys.excepthook) == (level, hook)
    with pytest.raises(RunnerError, match="it was closed"):
        await run
    assert policy.cancelled.is_set()
    with pytest.raises(RunnerError, match="it was closed"):
        await runner.run(SAMPLES[0], Echo())
    assert (logging.getLogger().level, sys.excepthook) == (level, hook)
    assert logging.getLogger().handlers == handlers
    assert list(tmp_path.iterdir()) == []


async def test_a_second_runner_at_the_same_time_is_refused_and_the_first_lives() -> None:
    info = load_inspect_task(numbers)
    async with TaskRunner(info) as runner:
        with pytest.raises(RunnerError, match="not allowed"):
            await TaskRunner(info).__aenter__()
        assert score_episode(await runner.run(info.samples[0], Echo())).reward == 1.0


class _NeverThere(SandboxEnvironment):
    """A provider that cannot start."""

    @classmethod
    async def task_init(cls, task_name: str, config: object) -> None:
        raise OSError("the provider is down")

    exec = write_file = read_file = sample_cleanup = None  # type: ignore[assignment]


async def test_a_task_that_dies_ends_every_run_that_waits_for_it_and_starts_again_with_the_next() -> None:
    sandboxenv(name="never-there")(_NeverThere)
    held = Held("1")
    async with TaskRunner(load_inspect_task(numbers)) as runner:
        waiting = asyncio.create_task(runner.run(SAMPLES[0], held))
        await held.asked.wait()
        with pytest.raises(RunnerError, match="the provider is down"):
            await runner.run(Sample(input="x", id="y", sandbox="never-there"), Echo())
        with pytest.raises(RunnerError, match="the provider is down"):
            await waiting
        assert runner.is_open
        assert score_episode(await runner.run(SAMPLES[0], Echo())).reward == 1.0


async def test_the_end_of_one_of_two_tasks_leaves_the_other_alone() -> None:
    sandboxenv(name="never-there")(_NeverThere)
    first, second = load_inspect_task(numbers), load_inspect_task(numbers)
    held = Held("1")
    async with TaskRunner([first, second]) as runner:
        waiting = asyncio.create_task(runner.run(SAMPLES[0], held, task=first))
        await held.asked.wait()
        with pytest.raises(RunnerError, match="the provider is down"):
            await runner.run(Sample(input="x", id="y", sandbox="never-there"), Echo(), task=second)
        held.go.set()
        assert score_episode(await waiting).reward == 1.0
        assert score_episode(await runner.run(SAMPLES[0], Echo(), task=second)).reward == 1.0


async def test_a_task_joins_the_running_eval_with_options_of_its_own() -> None:
    first, second = load_inspect_task(numbers), load_inspect_task(numbers, scorer=model_graded_qa())
    held = Held("1")
    async with TaskRunner(first) as runner:
        waiting = asyncio.create_task(runner.run(SAMPLES[0], held))
        await held.asked.wait()
        await runner.add(second, RunnerOptions(allow_self_grading=True))
        await runner.add(second, RunnerOptions(allow_self_grading=True))
        policy = Scripted("1", "GRADE: C")
        assert score_episode(await runner.run(SAMPLES[0], policy, task=second)).reward == 1.0
        await runner.add(second)
        with pytest.raises(SelfGradingError):
            await runner.run(SAMPLES[0], Scripted("1"), task=second, options=RunnerOptions())
        held.go.set()
        assert score_episode(await waiting).reward == 1.0


async def test_a_task_that_cannot_join_is_its_own_error() -> None:
    first = load_inspect_task(numbers)
    second = load_inspect_task(Task(dataset=list(SAMPLES), scorer=match(), cost_limit=1.0))
    priceless = get_model("mockllm/model", memoize=False)
    async with TaskRunner(first) as runner:
        with pytest.raises(RunnerError, match="Missing cost data for: mockllm/model"):
            await runner.add(second, RunnerOptions(model_roles={"grader": priceless}))
        assert score_episode(await runner.run(SAMPLES[0], Echo())).reward == 1.0


async def test_a_sandbox_that_nobody_provides_is_one_episodes_error() -> None:
    async with TaskRunner(load_inspect_task(numbers)) as runner:
        with pytest.raises(SandboxError, match=r"'no-such-sandbox'; known: .*docker, local"):
            await runner.run(Sample(input="x", id="y", sandbox="no-such-sandbox"), Echo())
        assert score_episode(await runner.run(SAMPLES[0], Echo())).reward == 1.0
