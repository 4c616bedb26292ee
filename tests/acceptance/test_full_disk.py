"""A disk that becomes full ends a run with one line; with room again, the run resumes and loses nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import DEMO, SHORT, as_options, start
from run_ledger import check_books, standing_steps

pytestmark = pytest.mark.timeout(900)

SETTINGS = SHORT | {
    "training.steps": 6,
    "training.groups_per_step": 6,
    "training.checkpoint_every": 1,
    "evaluation.episodes": 0,
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, of 48 MiB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", folder], capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        return ballast


@pytest.mark.parametrize("who", ["trainer", pytest.param("server", marks=pytest.mark.long)])
def test_a_full_disk_is_named_and_the_run_resumes(who: str, small_disk: Path, tmp_path: Path) -> None:
    if who == "trainer":
        run, full, more = small_disk / "run", "small disk/run", {"experiment_dir": "small disk/run"}
    else:
        run, full = tmp_path / "run", str(small_disk)
        more = {"interchange_server.store": f"sqlite://{small_disk / 'ledger.sqlite'}"}
    command = start(tmp_path, "train", str(DEMO), *as_options(SETTINGS | more))
    command.until(lambda: (run / "checkpoints" / "step_0001" / "manifest.json").exists(), seconds=300)
    ballast = fill(small_disk)
    assert command.wait(seconds=300) == 2, command.text()
    errors = [line for line in command.text().splitlines() if "error" in line]
    assert errors == [f"error: the disk of {full} is full; finished work is not lost"], command.text()
    assert "Traceback" not in command.text()
    assert "starting it again" not in command.text()
    drafts = [path for path in tmp_path.rglob(".*") if path.name != ".lock"]
    assert drafts == []
    ballast.unlink()
    command = start(tmp_path, "train", "--resume", str(run.relative_to(tmp_path)))
    assert command.wait(seconds=300) == 0, command.text()
    assert json.loads((run / "summary.json").read_text())["episodes_lost"] == 0
    check_books(run, may_fail=True)
    assert standing_steps(run) == list(range(1, SETTINGS["training.steps"] + 1))
