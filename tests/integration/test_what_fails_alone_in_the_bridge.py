"""An error in one episode of an Inspect task, at any stage of the bridge, ends no other episode of its eval.

Under tinker_cookbook's loop it is raised by the victim's group, and in a run by the name of its episode.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import TrajectoryGroup

from bridge_parts import END, Says, bytes_renderer
from failing_ledger import VICTIM, FailingLedger, planted
from inspect_tinker_bridge import env as bridge_env
from inspect_tinker_bridge import load_environment
from inspect_tinker_bridge.conversion import ChatConverter
from inspect_tinker_bridge.env import InspectEnv, TokenBuffer
from inspect_tinker_bridge.episodes import EpisodeOutcome, PendingCalls
from run_ledger import ask
from tinkerscript.config import RunConfig
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.sampler import SampleRequest
from tinkerscript.testing import QuietReporter
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.policy import SeededSampler
from tinkerscript.train.run import run_training
from tinkerscript.workers import inspect_task

pytestmark = pytest.mark.timeout(60)

MARK = "plant-it-here"
"""In what the victim is asked, and in nobody else's words."""

NAMES = (VICTIM, "neighbor", "later")


class Wordless(Exception):
    """Its words cannot be had."""

    def __repr__(self) -> str:
        raise RuntimeError("planted: the error's own words")


class Abrupt(BaseException):
    """As those of pytest, trio and others, which `except Exception` lets through."""


ERRORS: dict[str, tuple[type[BaseException], str]] = {
    "raises": (RuntimeError, "planted: raises"),
    "raises half a character": (ValueError, "planted: json.loads('\"\\ud800\"') is \ud800"),
    "raises without words": (Wordless, "planted: raises without words"),
    "raises what is no Exception": (Abrupt, "planted: raises what is no Exception"),
    "exits": (SystemExit, "planted: exits"),
    "is cancelled": (asyncio.CancelledError, "planted: is cancelled"),
}
"""What the solver or the scorer of the victim does."""


def check(where: str, state: TaskState) -> None:
    who, _, what = FailingLedger.stage.partition(" ")
    if who == where and state.sample_id == VICTIM:
        kind, words = ERRORS[what]
        raise kind(words)


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
def three() -> Task:
    samples = [Sample(id=name, input=MARK if name == VICTIM else "Hi", target="x") for name in NAMES]
    return Task(dataset=samples, solver=[checked(), generate()], scorer=full_marks())


SEAMS: dict[str, tuple[Any, str]] = {
    "call": (PendingCalls, "generate"),
    "template": (TokenBuffer, "render"),
    "parse": (InspectEnv, "_parse"),
    "reply": (InspectEnv, "_answer"),
    "outcome": (EpisodeOutcome, "of"),
    "reward": (bridge_env, "score_episode"),
    "metrics": (InspectEnv, "_metrics"),
}
"""Stage -> the class or module, and what does it."""


OWN = [f"{who} {what}" for who in ("solver", "scorer") for what in ERRORS]


def plant(stage: str, seams: dict[str, tuple[Any, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FailingLedger, "stage", stage)
    if stage in seams:
        owner, name = seams[stage]
        failing = planted(getattr(owner, name), stage, MARK)
        monkeypatch.setattr(owner, name, staticmethod(failing) if name == "of" else failing)


class Replies(Says):
    async def __call__(self, model_input: Any, stop: Any, **more: Any) -> Any:
        asked = str(self.renderer.tokenizer.decode(model_input.to_ints()))
        if FailingLedger.stage == "sample" and MARK in asked:
            raise RuntimeError("planted: sample")
        return await super().__call__(model_input, stop, **more)

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer, "Hi" + END)
        self.renderer = renderer


@pytest.mark.parametrize("stage", [*OWN, "sample", *SEAMS])
async def test_a_group_of_tinker_cookbooks_loop(
    byte_model: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = bytes_renderer(byte_model)
    dataset = load_environment(three(), renderer, env_type="task", num_envs_per_group=2)
    plant(stage, SEAMS, monkeypatch)

    async def rewards(number: int) -> list[float]:
        group: TrajectoryGroup = await do_group_rollout(dataset.get_batch(number)[0], Replies(renderer))
        return group.get_total_rewards()

    victim, neighbor = await asyncio.gather(rewards(0), rewards(1), return_exceptions=True)
    assert "planted: " in str(victim)
    assert isinstance(victim, Exception)
    assert [neighbor, await rewards(2)] == [[1.0, 1.0], [1.0, 1.0]]
    monkeypatch.undo()
    assert await rewards(0) == [1.0, 1.0]


OURS: dict[str, tuple[Any, str]] = {
    "outcome": SEAMS["outcome"],
    "request": (ChatConverter, "request"),
    "reward": (inspect_task, "score_episode"),
    "report": (inspect_task, "report_of"),
    "transcript": (inspect_task, "pack_transcript"),
}


@pytest.mark.parametrize("stage", ["solver raises", "scorer raises half a character", "sample", *OURS])
async def test_an_episode_of_a_run(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / "run"),
            "enable_tinkerscript_mode": False,
            "interchange_server": {"interchange_server_port": 0, "max_attempts": 1},
            "task": {"name": f"{__file__}@three"},
            "sampling": {"max_tokens": 4},
            "training": {"steps": 0},
            "evaluation": {"episodes": 3},
        }
    )
    tokenizer, sample = LightTokenizer(TINY_MODEL), SeededSampler.sample

    async def sampled(self: SeededSampler, request: SampleRequest, progress: Any = None) -> Any:
        if stage == "sample" and MARK in tokenizer.decode(unpack_ids(request.prompt).tolist()):
            raise RuntimeError("planted: sample")
        return await sample(self, request, progress)

    monkeypatch.setattr(SeededSampler, "sample", sampled)
    plant(stage, OURS, monkeypatch)
    folder = await run_training(config, QuietReporter())
    query = "SELECT a.failure FROM episodes LEFT JOIN attempts AS a ON episode = sequence"
    failures = [failure for (failure,) in ask(folder.path, query)]
    failed = [json.loads(failure)["message"] for failure in failures if failure is not None]
    planted_words = "the engine raised RuntimeError" if stage == "sample" else "planted: "
    assert [planted_words in words for words in failed] == [True, True], "in each evaluation"
    assert len(failures) == 2 * len(NAMES)
