"""A storm of episodes that end in every possible way, and what the process holds before and after.

Each episode is told by its sample's metadata where to stop: there it says so and waits to be cancelled.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, chain, solver
from inspect_ai.tool import Tool, bash, tool
from inspect_ai.util import sandbox
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout

from bridge_parts import END, Says, call
from inspect_tinker_bridge import EnvOptions, InspectEnv, TaskFailedError, TaskRunner

STAGES = ("setup", "solver", "tool", "exec", "sampling", "after", "scorer")
"""Where an episode can be cancelled: each awaits something else."""

FATES = (
    *STAGES,
    "tool raises",
    "solver raises",
    "scorer raises",
    "trainer stops early",
    "trainer walks away",
    "never looked at",
    "ends",
)

_REACHED: dict[str, asyncio.Event] = {}


async def _at(stage: str, state: TaskState) -> None:
    """Say that the stage is reached, and wait there for ever, if this is where the episode is to stop."""
    if state.metadata["fate"] == stage:
        _REACHED[str(state.sample_id)].set()
        if stage == "exec":
            await sandbox().exec(["sleep", "3600"])
        await asyncio.Event().wait()
    if state.metadata["fate"] == f"{stage} raises":
        raise ValueError(f"the {stage} raises")


@tool
def note() -> Tool:
    async def execute(text: str) -> str:
        """Note something.

        Args:
            text: What.
        """
        from inspect_ai.solver._task_state import sample_state

        state = sample_state()
        assert state is not None
        await _at("tool", state)
        await _at("exec", state)
        await sandbox().write_file("note", text)
        return "noted"

    return execute


@solver
def staged(stage: str) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await _at(stage, state)
        return state

    return solve


@scorer(metrics=[accuracy()])
def noted() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        await _at("scorer", state)
        return Score(value=int(await sandbox().read_file("note") == "x"))

    return score


def storm_task(episodes: int, seed: int) -> Task:
    """`episodes` samples in the local sandbox, each with a fate."""
    rng = random.Random(seed)
    samples = [
        Sample(
            input="Note x.",
            id=f"{number}",
            files={"in.txt": "text"},
            metadata={"fate": FATES[number] if number < len(FATES) else rng.choice(FATES)},
        )
        for number in range(episodes)
    ]
    return Task(
        dataset=samples,
        setup=staged("setup"),
        solver=chain(staged("solver"), react(tools=[note(), bash(timeout=5)]), staged("after")),
        scorer=noted(),
        sandbox="local",
    )


class _Stalls(Says):
    """Says that it was asked, and never answers."""

    reached: asyncio.Event

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.reached.set()
        await asyncio.Event().wait()


async def live(runner: TaskRunner, sample: Sample, renderer: Renderer) -> str:
    """One episode to its fate; how it ended."""
    fate = str((sample.metadata or {})["fate"])
    says = [call("note", '{"text": "x"}') + END, call("submit", '{"answer": "done"}') + END]
    env = InspectEnv(runner, sample, renderer, EnvOptions("task"))
    reached = _REACHED[str(sample.id)] = asyncio.Event()
    if fate == "never looked at":
        return fate
    if fate == "trainer walks away":
        await env.initial_observation()
        await env.abandon()
        return fate
    policy = Says(renderer, *says)
    if fate == "sampling":
        policy = _Stalls(renderer, *says)
        policy.reached = reached
    limits = RolloutLimits(max_turns=1) if fate == "trainer stops early" else None
    rollout = asyncio.create_task(run_rollout(policy, env, limits=limits))
    watch = asyncio.create_task(reached.wait())
    try:
        await asyncio.wait({rollout, watch}, return_when=asyncio.FIRST_COMPLETED)
        if fate in STAGES:
            rollout.cancel()
            await asyncio.wait({rollout})
            return "cancelled" if rollout.cancelled() else "not cancelled"
        await asyncio.wait({rollout})
        error = rollout.exception()
        if error is not None:
            return "failed" if isinstance(error, TaskFailedError) else repr(error)
        if fate == "trainer stops early":
            return f"stopped, {(await env.finish())[0]}"
        return f"ended, {sum(transition.reward for transition in rollout.result().transitions)}"
    finally:
        watch.cancel()
        await env.abandon()
        del _REACHED[str(sample.id)]


EXPECTED = {
    **dict.fromkeys(STAGES, "cancelled"),
    # A tool that raises ValueError ends the sample, as in plain Inspect.
    "tool raises": "failed",
    "solver raises": "failed",
    "scorer raises": "failed",
    "trainer stops early": "stopped, 1.0",
    "trainer walks away": "trainer walks away",
    "never looked at": "never looked at",
    "ends": "ended, 1.0",
}


async def storm(
    runner: TaskRunner, samples: list[Sample], renderer: Renderer, *, at_once: int
) -> Counter[tuple[str, str]]:
    """Every sample to its fate, `at_once` at a time: how often each fate ended how."""
    limit = asyncio.Semaphore(at_once)

    async def one(sample: Sample) -> tuple[str, str]:
        async with limit:
            ended = await live(runner, sample, renderer)
        return str((sample.metadata or {})["fate"]), ended

    return Counter(await asyncio.gather(*(one(sample) for sample in samples)))


def _name(process: psutil.Process) -> str:
    """Empty for one that has ended since it was listed."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def held(folder: Path) -> dict[str, Any]:
    """What this process holds: children, open files, threads, asyncio tasks, and files in `folder`."""
    process = psutil.Process()
    return {
        "children": sorted(name for child in process.children(recursive=True) if (name := _name(child))),
        "files": process.num_fds(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": sorted(str(task.get_coro().__qualname__) for task in asyncio.all_tasks()),  # type: ignore[union-attr]
        "folders": sorted(path.name for path in folder.iterdir()),
    }


async def settled(folder: Path, before: dict[str, Any], *, within_s: float = 20.0) -> dict[str, Any]:
    """What is held, once it is what it was before or the time is up."""
    deadline = asyncio.get_running_loop().time() + within_s
    loop = asyncio.get_running_loop()
    while (now := held(folder)) != before and loop.time() < deadline:  # noqa: ASYNC110 (other processes end)
        await asyncio.sleep(0.02)
    return now
