"""`tinkerscript train` as a user runs it: it learns, it survives deaths, it says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import metrics_lines, named, start_training, summary


def steps_done(folder: Path) -> int:
    return sum("reward/mean" in line for line in metrics_lines(folder))


def test_a_worker_and_the_server_killed_in_the_middle_come_back_and_nothing_is_lost(tmp_path: Path) -> None:
    command = start_training(tmp_path)
    command.until(lambda: steps_done(tmp_path) >= 1)
    named(command.family(), "tinkerscript worker")[0].kill()
    command.until(lambda: steps_done(tmp_path) >= 2)
    (server,) = named(command.family(), "tinkerscript server")
    server.kill()
    assert command.wait() == 0, command.text()
    result = summary(tmp_path)
    assert "worker 0 died (signal 9); starting it again" in command.text()
    assert "interchange server died (signal 9); starting it again" in command.text()
    assert result["processes_restarted"] == 2
    assert result["train_episodes"] == 4 * 12 * 4
    assert result["eval_episodes"] == 40
    assert (result["episodes_lost"], result["episodes_failed"]) == (0, 0)
    assert result["server_results_accepted"] == result["episodes_accepted"] == 4 * 12 * 4 + 2 * 40
    assert result["max_abs_dlogp"] <= 1e-4
    assert result["sequences_per_episode"] == 1.0
    assert "held-out score after" in command.text()
    assert "run folder" in command.text()


@pytest.mark.long
def test_a_scorer_that_raises_is_a_failure_and_not_a_zero(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import generate

@scorer(metrics=[accuracy()])
def broken():
    async def score(state, target):
        if state.sample_id == "bad":
            raise RuntimeError("no score for this one")
        return Score(value=len(state.output.completion) % 3)
    return score

@task
def words():
    return Task(dataset=[Sample(id="good", input="Hi"), Sample(id="bad", input="Hi")],
                solver=generate(), scorer=broken())
"""
    )
    command = start_training(
        tmp_path,
        **{
            "task.name": "task.py@words",
            "task.train_args": "{}",
            "task.eval_args": "{}",
            "training.steps": 1,
            "training.groups_per_step": 2,
            "evaluation.episodes": 2,
        },
    )
    assert command.wait() == 0, command.text()
    result = summary(tmp_path)
    assert (result["train_episodes"], result["episodes_failed"], result["episodes_lost"]) == (4, 4 + 2, 0)
    assert (result["eval_episodes"], result["eval_failed"]) == (1, 2)
    rollouts = (tmp_path / "run" / "rollouts" / "step_0001.jsonl").read_text().splitlines()
    failures = [r["failures"] for r in map(json.loads, rollouts) if "failures" in r]
    assert len(failures) == 4
    # Each of the three attempts is recorded with its reason.
    assert [f["kind"] for f in failures[0]] == ["task_error"] * 3
    assert all("no score for this one" in f["message"] for f in failures[0])


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = start_training(tmp_path, **{"interchange_server.interchange_server_port": port})
        assert command.wait() == 2, command.text()
    assert str(port) in command.text()
    assert "interchange_server_port" in command.text()
    assert "Traceback" not in command.text()
