"""A trainer that is killed goes on from its run folder: nothing is lost, nothing trains twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import DEMO, SHORT, Command, as_options, start
from run_ledger import ask, check_books, standing_steps, with_result
from tinkerscript.commands.train import WORSE
from tinkerscript.config import load_config
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

STEPS = 5
EVALUATED = 12
SETTINGS = SHORT | {
    "training.steps": STEPS,
    "training.groups_per_step": 6,
    "training.checkpoint_every": 2,
    "evaluation.episodes": EVALUATED,
    "evaluation.every_steps": 2,
    "evaluation.interim_episodes": 8,
    # With more, rounding decides on which side of the clip a ratio falls that is on its edge.
    "training.minibatches": 1,
}


def kill_when(command: Command, condition: Callable[[], object]) -> None:
    """SIGKILL to the trainer alone; its children end by themselves."""
    command.until(condition)
    family = command.family()
    command.process.kill()
    command.process.wait()
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, [process.cmdline() for process in alive]
    assert gone


def killed_and_resumed(tmp_path: Path, **more: Any) -> tuple[Path, dict[str, Any]]:
    """The folder and the summary of a run whose trainer is killed at a random moment."""
    run = tmp_path / "run"
    command = start(tmp_path, "train", str(DEMO), *as_options(SETTINGS | more))
    moment = random.randrange(1, 3 * SETTINGS["training.groups_per_step"] * SETTINGS["training.group_size"])
    print("killed after", moment, "training episodes")
    kill_when(command, lambda: len(with_result(run)) >= moment)
    command = start(tmp_path, "train", "--resume", "run")
    # A dozen samples may say that the model is worse; that is no part of what is tried.
    assert command.wait(seconds=240) in (0, WORSE), command.text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["episodes_lost"], summary["steps"]) == (0, STEPS)
    assert summary["max_abs_dlogp"] < 1e-4
    check_books(run, may_fail=True)
    assert standing_steps(run) == list(range(1, STEPS + 1))
    return run, summary


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_run_that_is_killed_at_a_random_step_has_the_curve_of_one_that_is_not(tmp_path: Path) -> None:
    run, summary = killed_and_resumed(tmp_path)
    assert summary["eval_episodes"] == EVALUATED
    assert len(ask(run, "SELECT step FROM resumptions")) == 2
    # The same curve as in one process, without a server, workers and deaths.
    alone = {"enable_tinkerscript_mode": False, "experiment_dir": str(tmp_path / "whole")}
    config = load_config(DEMO, [f"{key}={value}" for key, value in (SETTINGS | alone).items()])
    whole = asyncio.run(run_training(config, QuietReporter()))
    curve, expected = steps_of(run), steps_of(whole.path)
    assert [line["step"] for line in curve] == list(range(1, STEPS + 1))
    for ours, theirs in zip(curve, expected, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-4)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_run_whose_groups_stream_is_killed_and_goes_on_with_what_was_in_flight(tmp_path: Path) -> None:
    run, summary = killed_and_resumed(tmp_path, **{"training.max_policy_lag": 2})
    assert summary["episodes_discarded"] == 0
    (lags,) = ask(run, "SELECT min(max_lag), max(max_lag) FROM steps WHERE undone = 0")
    assert 0 <= lags[0] <= lags[1] <= 2
    positions = "SELECT DISTINCT position FROM episodes WHERE undone = 0 AND position >= 0 ORDER BY position"
    assert [position for (position,) in ask(run, positions)] == [
        *range(STEPS * SETTINGS["training.groups_per_step"])
    ], "each sample once"


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]
