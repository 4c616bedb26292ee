"""The page of a run that `tinkerscript train` does: its address comes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from command_line import DEMO, SHORT, Command, as_options, named, start, start_training

WATCH = "watch the run at "


def url_of(command: Command) -> str:
    """The address, which comes first."""
    command.until(lambda: "\n" in command.text().partition(WATCH)[2])
    first = command.text().splitlines()[0]
    assert first.startswith(f"{WATCH}http://127.0.0.1:"), command.text()
    return first.removeprefix(WATCH)


def get(url: str) -> Any:
    reply = httpx.get(url, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def page_of(command: Command) -> psutil.Process:
    (found,) = named(command.family(), "tinkerscript view run")
    return found


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_run_with_a_server(tmp_path: Path) -> None:
    command = start_training(tmp_path)
    url = url_of(command)
    command.until(lambda: "evaluation before" in command.text())
    page = page_of(command)
    assert get(f"{url}/api/runs/run")["name"] == "run"
    assert get(f"{url}/api/runs/run/fleet")["policy_version"] >= 0
    assert command.wait() == 0, command.text()
    assert gone(page)
    assert command.text().splitlines()[-2:] == [
        "look at it again   tinkerscript view run",
        "health             all well",
    ]


@pytest.mark.long
def test_the_page_does_not_outlive_a_trainer_that_is_killed(tmp_path: Path) -> None:
    command = start_training(tmp_path, enable_tinkerscript_mode=False, **{"training.steps": 10_000})
    url_of(command)
    command.until(lambda: "evaluation before" in command.text())
    page = page_of(command)
    command.process.kill()
    _, alive = psutil.wait_procs([page], timeout=20)
    assert not alive


@pytest.mark.long
def test_a_supervised_run(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 8)
    settings = {**SHORT, "method": "sft", "sft.data": tmp_path / "chats.jsonl", "sft.held_out": 0}
    command = start(tmp_path, "train", str(DEMO), *as_options(settings))
    url_of(command)
    assert command.wait() == 0, command.text()
    *_, folder, use, again = command.text().splitlines()
    assert folder.startswith("run folder         run   (")
    assert use.startswith("train from it      tinkerscript train CONFIG ")
    assert again == "look at it again   tinkerscript view run"
