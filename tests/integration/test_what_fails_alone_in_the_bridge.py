"""An error in one episode of an Inspect task, at any stage of the bridge, ends no other episode of its eval.

Each sample is named after what fails for it; the others are its neighbors, at work at the same time. Under
tinker_cookbook's loop the error is raised by the sample's group, and in a run it is its episode's failure.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from bridge_parts import END, Says, bytes_renderer
from failing_ledger import planted
from inspect_tinker_bridge import env as bridge_env
from inspect_tinker_bridge import load_environment
from inspect_tinker_bridge.conversion import ChatConverter
from inspect_tinker_bridge.env import InspectEnv, TokenBuffer
from inspect_tinker_bridge.episodes import EpisodeOutcome, PendingCalls
from run_ledger import ask
from tinkerscript.config import RunConfig
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from tinkerscript.workers import inspect_task

pytestmark = pytest.mark.timeout(60)


class Wordless(Exception):
    """Its words cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("planted: the error's own words")


class Abrupt(BaseException):
    """As those of pytest, trio and others, which `except Exception` lets through."""


ERRORS: dict[str, tuple[type[BaseException], str]] = {
    "raises": (RuntimeError, ""),
    "raises half a character": (ValueError, "json.loads('\"\\ud800\"') is \ud800"),
    "raises without words": (Wordless, ""),
    "raises what is no Exception": (Abrupt, ""),
    "exits": (SystemExit, ""),
    "is cancelled": (asyncio.CancelledError, ""),
}
"""What the solver or the scorer of a sample does."""

OWN = [f"{who} {what}" for who in ("solver", "scorer") for what in ERRORS]

LOOP: dict[str, tuple[Any, str]] = {
    "call": (PendingCalls, "generate"),
    "template": (TokenBuffer, "render"),
    "parse": (InspectEnv, "_parse"),
    "reply": (InspectEnv, "_answer"),
    "outcome": (EpisodeOutcome, "of"),
    "reward": (bridge_env, "score_episode"),
    "metrics": (InspectEnv, "_metrics"),
}
"""Stage under tinker_cookbook's loop -> the class or module, and what does it."""

RUN: dict[str, tuple[Any, str]] = {
    "outcome": LOOP["outcome"],
    "request": (ChatConverter, "request"),
    "reward": (inspect_task, "score_episode"),
    "report": (inspect_task, "report_of"),
    "transcript": (inspect_task, "pack_transcript"),
}
"""Stage in a run -> the same."""

NAMES = [*OWN, *LOOP, *(RUN.keys() - LOOP.keys()), "neighbor"]


def check(where: str, state: TaskState) -> None:
    who, _, what = str(state.sample_id).partition(" ")
    if who == where:
        kind, words = ERRORS[what]
        raise kind(f"planted: [{state.sample_id}] {words}")


@solver
def checked() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        check("solver", state)
        return state

    return solve


@scorer(metrics=[accuracy()])
def full_marks() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        check("scorer", state)
        return Score(value=1.0, answer="\ud800", explanation="\ud800")

    return score


@task
def everything() -> Task:
    samples = [Sample(id=name, input=f"[{name}]", target="x") for name in NAMES]
    return Task(dataset=samples, solver=[checked(), generate()], scorer=full_marks())


def plant(stages: dict[str, tuple[Any, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for stage, (owner, name) in stages.items():
        failing = planted(getattr(owner, name), f"[{stage}]", f"[{stage}]")
        monkeypatch.setattr(owner, name, staticmethod(failing) if name == "of" else failing)


async def test_groups_of_tinker_cookbooks_loop(byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = bytes_renderer(byte_model)
    dataset = load_environment(everything(), renderer, env_type="task", num_envs_per_group=2)
    plant(LOOP, monkeypatch)

    async def rewards(name: str) -> list[float]:
        (builder,) = dataset.get_batch(NAMES.index(name))
        group: TrajectoryGroup = await do_group_rollout(builder, Says(renderer, "Hi" + END))
        return group.get_total_rewards()

    found = await asyncio.gather(*map(rewards, NAMES), return_exceptions=True)
    failed = {
        name
        for name, result in zip(NAMES, found, strict=True)
        if isinstance(result, Exception) and f"planted: [{name}]" in str(result)
    }
    assert failed == {*OWN, *LOOP}
    assert [result for result in found if result == [1.0, 1.0]] == [[1.0, 1.0]] * (len(NAMES) - len(failed))
    monkeypatch.undo()
    assert [await rewards(stage) for stage in LOOP] == [[1.0, 1.0]] * len(LOOP)


async def test_episodes_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / "run"),
            "enable_tinkerscript_mode": False,
            "interchange_server": {"interchange_server_port": 0, "max_attempts": 1},
            "task": {"name": f"{__file__}@everything"},
            "sampling": {"max_tokens": 4},
            "training": {"steps": 0},
            "evaluation": {"episodes": len(NAMES)},
        }
    )
    plant(RUN, monkeypatch)
    folder = await run_training(config, QuietReporter())
    query = "SELECT a.failure FROM episodes LEFT JOIN attempts AS a ON episode = sequence"
    failures = [failure for (failure,) in ask(folder.path, query)]
    failed = [json.loads(failure)["message"] for failure in failures if failure is not None]
    named = [re.findall(r"planted: \[(.*?)\]", words) for words in failed]
    assert sorted(name for name, *_ in named) == sorted(2 * [*OWN, *RUN]), "in each evaluation"
    assert len(failures) == 2 * len(NAMES)
