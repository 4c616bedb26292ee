"""A trainer that is killed goes on from its run folder: nothing is lost, nothing trains twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from command_line import DEMO, SHORT, Command, as_options, start
from interchange_helpers import stored_outcomes
from tinkerscript.config import load_config
from tinkerscript.testing import QuietReporter
from tinkerscript.train.journal import (
    AnyEvent,
    EpisodeRegistered,
    PolicyPublished,
    Resumed,
    StepConsumed,
    read_journal,
)
from tinkerscript.train.run import run_training
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

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


def events(run: Path) -> list[AnyEvent]:
    path = run / "journal.jsonl"
    return read_journal(path) if path.exists() else []


def kill_when(command: Command, condition: Callable[[], object]) -> None:
    """SIGKILL to the trainer alone; its children end by themselves."""
    command.until(condition)
    family = command.family()
    command.process.kill()
    command.process.wait()
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, [process.cmdline() for process in alive]
    assert gone


def resumed(tmp_path: Path, **more: Any) -> Command:
    return start(tmp_path, "train", "--resume", "run", *as_options(more))


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_run_that_is_killed_at_a_random_step_has_the_curve_of_one_that_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = start(tmp_path, "train", str(DEMO), *as_options(SETTINGS))
    moment = random.randrange(1, 3 * SETTINGS["training.groups_per_step"] * SETTINGS["training.group_size"])
    print("killed after", moment, "training episodes")
    kill_when(command, lambda: trained_on(run) >= moment)
    with (run / "journal.jsonl").open("ab") as file:
        file.write(b'{"type":"EpisodeAccepted","episode_uuid":"cut sh')
    command = resumed(tmp_path)
    assert command.wait(seconds=240) == 0, command.text()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["episodes_lost"] == 0
    assert summary["steps"] == STEPS
    assert summary["eval_episodes"] == EVALUATED
    assert summary["max_abs_dlogp"] < 1e-4
    check_books(run)
    # The same curve as in one process, without a server, workers and deaths.
    alone = {"enable_tinkerscript_mode": False, "experiment_dir": str(tmp_path / "whole")}
    config = load_config(DEMO, [f"{key}={value}" for key, value in (SETTINGS | alone).items()])
    whole = asyncio.run(run_training(config, QuietReporter()))
    curve, expected = steps_of(run), steps_of(whole.path)
    assert [line["step"] for line in curve] == list(range(1, STEPS + 1))
    for ours, theirs in zip(curve, expected, strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-4)


def trained_on(run: Path) -> int:
    return sum(isinstance(e, EpisodeAccepted) and e.episode_type == "train" for e in events(run))


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward/mean" in line]


def check_books(run: Path) -> None:
    """The journal against itself and against the server's file."""
    journal = events(run)
    registered = [e.episode_uuid for e in journal if isinstance(e, EpisodeRegistered)]
    ended = Counter(e.episode_uuid for e in journal if isinstance(e, EpisodeAccepted | EpisodeFailed))
    assert len(set(registered)) == len(registered)
    assert ended == Counter(registered)
    versions = [e.policy_version for e in journal if isinstance(e, PolicyPublished)]
    assert versions == sorted(set(versions))
    assert sum(isinstance(e, Resumed) for e in journal) == 1
    outcomes = stored_outcomes(run / "server.sqlite")
    assert all(outcomes[uuid] in ("accepted", "failed") for uuid in registered)
    consumed = surviving_steps(journal)
    assert sorted(consumed) == list(range(1, STEPS + 1))
    trained = Counter(uuid for uuids in consumed.values() for uuid in uuids)
    assert set(trained.values()) == {1}


def surviving_steps(journal: list[AnyEvent]) -> dict[int, list[str]]:
    """Step -> the episodes that it consumed, along the line that survived."""
    consumed: dict[int, list[str]] = {}
    for event in journal:
        if isinstance(event, StepConsumed):
            consumed[event.step] = event.episode_uuids
        elif isinstance(event, Resumed):
            consumed = {step: uuids for step, uuids in consumed.items() if step <= event.step}
    return consumed
