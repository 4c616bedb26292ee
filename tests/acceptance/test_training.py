"""`tinkerscript train` as a user runs it: it learns, it survives deaths, it says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from command_line import DEMO, ROOT, SHORT, as_options, metrics_lines, named, start, start_training, summary
from run_ledger import check_books


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
    assert result["episodes_accepted"] == 4 * 12 * 4 + 2 * 40
    check_books(tmp_path / "run")
    assert result["max_abs_dlogp"] <= 1e-4
    assert result["sequences_per_episode"] == 1.0
    assert "held-out score after" in command.text()
    assert "run folder" in command.text()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", ["sampling.temperature=0.7", "training.max_policy_lag=2"])
def test_the_demo_learns_at_another_temperature_and_while_groups_stream(tmp_path: Path, setting: str) -> None:
    settings = [f"--set={setting}", "--set=interchange_server.interchange_server_port=0"]
    task = f"--set=task.name={ROOT / 'examples' / 'arithmetic.py'}@arithmetic"
    folder = "--set=experiment_dir=run"
    command = start(tmp_path, "train", str(ROOT / "examples" / "arithmetic.yaml"), task, folder, *settings)
    assert command.wait(seconds=360) == 0, command.text()
    result = summary(tmp_path)
    assert result["eval_after"] > 0.95 > result["eval_before"] + 0.15
    assert result["max_abs_dlogp"] <= 1e-4
    assert result["episodes_lost"] == 0


WATCH = "watch the run at http://127.0.0.1:"


@pytest.mark.long
def test_the_page_does_not_outlive_a_trainer_that_is_killed(tmp_path: Path) -> None:
    command = start_training(tmp_path, enable_tinkerscript_mode=False, **{"training.steps": 10_000})
    command.until(lambda: "evaluation before" in command.text())
    assert command.text().startswith(WATCH)
    (page,) = named(command.family(), "tinkerscript view run")
    command.process.kill()
    _, alive = psutil.wait_procs([page], timeout=20)
    assert not alive


@pytest.mark.long
def test_a_supervised_run(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 8)
    settings = {**SHORT, "method": "sft", "sft.data": tmp_path / "chats.jsonl", "sft.held_out": 0}
    command = start(tmp_path, "train", str(DEMO), *as_options(settings))
    assert command.wait() == 0, command.text()
    first, *_, folder, use, again = command.text().splitlines()
    assert first.startswith(WATCH)
    assert folder.startswith("run folder         run   (")
    assert use.startswith("train from it      tinkerscript train CONFIG ")
    assert again == "look at it again   tinkerscript view run"
