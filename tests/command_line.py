"""Running the `tinkerscript` command as a user does, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from forked import Forked
from tinkerscript.__main__ import main

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "arithmetic.yaml"
_OWN = Path(sys.executable).parent / "tinkerscript"
COMMAND = _OWN if _OWN.exists() else ROOT / ".venv" / "bin" / "tinkerscript"
"""In an environment over `.venv`, that of `.venv`."""


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


_ENVIRON = _environ()

SHORT: dict[str, Any] = {
    "task.name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
    "experiment_dir": "run",
    "interchange_server.interchange_server_port": 0,
    "training.steps": 4,
    "training.groups_per_step": 12,
    "training.group_size": 4,
    "evaluation.episodes": 40,
    "evaluation.every_steps": 0,
    "workers.count": 1,
    "workers.concurrency": 16,
}
"""The demo's config, shortened."""


@dataclass
class Command:
    """A running `tinkerscript` command; its output goes to a file."""

    process: subprocess.Popen[bytes] | Forked
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, condition: Callable[[], object], *, seconds: float = 90) -> None:
        """Wait for a condition; fails with the command's output if it ends or takes too long first."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the command ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.text()}"
            time.sleep(0.02)

    def wait(self, *, seconds: float = 150) -> int:
        return self.process.wait(timeout=seconds)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


STARTED: list[Command] = []
"""Every command of the current test, for the fixture that ends what a failed test leaves."""


def start(
    folder: Path,
    *arguments: str,
    env: dict[str, str] | None = None,
    lasts: bool = False,
    program: Path = COMMAND,
    output: str = "output.txt",
    fresh: bool = False,
) -> Command:
    """`lasts`: beyond the test, whose end is then its fixture's business. `output`: file in the folder.

    A trainer starts with its imports done, in an environment that no test has changed: libraries read
    variables when they are imported. `fresh`: not so.
    """
    path = folder / output
    path.write_bytes(b"")
    process: subprocess.Popen[bytes] | Forked
    if arguments[0] == "train" and program == _OWN and env is None and _environ() == _ENVIRON and not fresh:
        process = Forked(main, cwd=folder, output=path, argv=[str(program), *map(str, arguments)])
    else:
        with path.open("ab") as file:
            process = subprocess.Popen([program, *arguments], cwd=folder, stdout=file, stderr=file, env=env)
    command = Command(process, path)
    if not lasts:
        STARTED.append(command)
    return command


def end_all() -> None:
    """End every command that a failed test left, with its children."""
    while STARTED:
        process = STARTED.pop().process
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            psutil.wait_procs(family, timeout=20)


def as_options(settings: dict[str, Any]) -> list[str]:
    return [f"--set={key}={value}" for key, value in settings.items()]


def start_training(folder: Path, **settings: Any) -> Command:
    return start(folder, "train", str(DEMO), *as_options({**SHORT, **settings}))


def metrics_lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "runs" / "latest" / "summary.json").read_text())


def named(processes: list[psutil.Process], text: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in processes:
        try:
            if text in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # It ended between the listing and the look.
    return found
