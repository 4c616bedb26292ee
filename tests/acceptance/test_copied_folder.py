"""A run's folder is copied while the run writes to it: the copy opens and resumes, or is refused by name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from command_line import COMMAND, Command, start, start_training
from run_ledger import ask

STEPS = 4


@pytest.mark.timeout(600)
def test_a_copy_of_a_run_that_goes_on_opens_and_resumes(tmp_path: Path) -> None:
    run, copies = tmp_path / "run", list[Path]()
    command = start_training(
        tmp_path, **{"training.steps": STEPS, "training.checkpoint_every": 1, "evaluation.episodes": 0}
    )
    for step in range(1, STEPS):
        manifest = run / "checkpoints" / f"step_{step:04}" / "manifest.json"
        command.until(manifest.exists)
        copies.append(copied(run, tmp_path / f"elsewhere-{step}"))
    assert command.wait() == 0, command.text()
    refused = [copy for copy in copies if not opens(copy)]
    whole = [copy for copy in copies if copy not in refused]
    assert whole, "SQLite's log is moved into the file once a step, and the copy takes less time"
    resumed = resume(whole[-1])
    assert resumed.wait() == 0, resumed.text()
    assert rewards(whole[-1]).keys() == set(range(1, STEPS + 1))
    assert rewards(whole[-1]) == rewards(run)
    assert ask(whole[-1], "SELECT count(*) FROM steps WHERE undone = 0") == [(STEPS,)]
    assert rewards(run).keys() == set(range(1, STEPS + 1)), "the run itself was left alone"


def copied(run: Path, target: Path) -> Path:
    """A copy of all that can be read, as `cp -r` makes it: files that go meanwhile are not in it."""
    target.mkdir()
    subprocess.run(["cp", "-r", run, target], stderr=subprocess.DEVNULL)
    return target / run.name


def opens(copy: Path) -> bool:
    """Whether `show` tells of it; it must say what is wrong otherwise."""
    shown = subprocess.run([COMMAND, "show", copy], capture_output=True, text=True)
    if shown.returncode == 0:
        return True
    assert "copied while the run wrote to it" in shown.stderr, shown.stderr
    return False


def resume(copy: Path) -> Command:
    return start(copy.parent, "train", "--resume", copy.name)


def rewards(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}
