"""What cannot start says so in one line, with the value and what to do, and leaves everything as it was."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from command_line import DEMO, SHORT, as_options, start
from newcomer import TASKS
from run_ledger import ask
from short_runs import short_run
from tinkerscript.cli import app
from tinkerscript.files import LEDGER_FILE
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

pytestmark = [pytest.mark.timeout(700), pytest.mark.xdist_group("starts")]  # All start from two runs.


class Start(NamedTuple):
    """`arguments` after `train`; `spoil` changes the folder first; every one of `words` is in the message."""

    arguments: list[str]
    words: list[str]
    spoil: Callable[[Path], object] = lambda folder: None


def new(*words: str, spoil: Callable[[Path], object] = lambda folder: None, **settings: object) -> Start:
    return Start([str(DEMO), *as_options(SHORT | settings)], list(words), spoil)


def resumed(spoil: Callable[[Path], object], *words: str) -> Start:
    """`spoil` changes a copy of a finished run."""
    return Start(["--resume", "one", "--set=training.steps=4"], list(words), spoil)


def sources(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "agent.py").write_text("print('precious')\n")


def tasks(folder: Path) -> None:
    (folder / "tasks.py").write_text(TASKS)


def gguf(folder: Path) -> None:
    (folder / "small.gguf").write_bytes(b"GGUF" + bytes(60))


def text_file(folder: Path) -> None:
    (folder / "notes").write_text("text\n")


def half_of(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "one" / name
        os.truncate(path, path.stat().st_size // 2)

    return spoil


def all_halved(folder: Path) -> None:
    for path in folder.glob("one/checkpoints/step_*/model.safetensors"):
        os.truncate(path, 1000)


def behind(folder: Path) -> None:
    """The ledger is an older copy, from before the last step."""
    with closing(sqlite3.connect(folder / "one" / LEDGER_FILE)) as ledger, ledger:
        for table in ("steps", "checkpoints", "trained"):
            ledger.execute(f"DELETE FROM {table} WHERE step = 3")


def of_another(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        target = folder / "one" / name
        if target.is_dir():
            shutil.rmtree(target)
            shutil.copytree(folder / "another" / name, target)
        else:
            shutil.copyfile(folder / "another" / name, target)

    return spoil


NOWHERE = "/proc/nowhere/run"

STARTS = {
    "a file as the run's folder": new("experiment_dir", "'notes'", spoil=text_file, experiment_dir="notes"),
    "a folder below a file": new(
        "'notes/run'", "Not a directory", spoil=text_file, experiment_dir="notes/run"
    ),
    "where nothing can be made": new(f"'{NOWHERE}'", "another folder", experiment_dir=NOWHERE),
    "too long a name": new("File name too long", "another folder", experiment_dir="n" * 300),
    "a folder of sources": new(
        "mine is not empty and holds no run", "new folder", spoil=sources, experiment_dir="mine"
    ),
    "a folder with a run": new("another already holds a run", "--resume another", experiment_dir="another"),
    "no such model": new("'nowhere/at/all' does not exist", **{"engine.model": "nowhere/at/all"}),
    "a file as the model": new(
        "notes' is a file", "config.json", spoil=text_file, **{"engine.model": "notes"}
    ),
    "a GGUF file": new(
        "small.gguf cannot be read as a GGUF model", spoil=gguf, **{"engine.model": "small.gguf"}
    ),
    "no GPU": new("engine.device: 'cuda'", "cpu", **{"engine.device": "cuda"}),
    "no run to resume": Start(["--resume", "nowhere"], ["there is no run in nowhere"]),
    "half a ledger": resumed(half_of(LEDGER_FILE), f"one/{LEDGER_FILE} cannot be read", "whole ledger back"),
    "an older ledger": resumed(
        behind, "ends with step 2", "checkpoint of step 3", "restore the whole ledger"
    ),
    "another run's ledger": resumed(of_another(LEDGER_FILE), LEDGER_FILE, "from another run"),
    "another run's checkpoint": resumed(of_another("checkpoints/step_0003"), "step_0003", "from another run"),
    "no whole checkpoint": resumed(all_halved, "no checkpoint in one is complete", "1000 of the ", "step 1"),
    "a task without samples": new(
        "has no samples",
        spoil=tasks,
        **{"task.name": "tasks.py@empty", "task.train_args": "{}", "task.eval_args": "{}"},
    ),
    "no such script": new("no script at", **{"workers.script": "nowhere.py"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, `one` and `another`."""
    folder = tmp_path_factory.mktemp("runs")
    training = {"steps": 3, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("one", "another"):
            asyncio.run(run_training(short_run(name, training=training), QuietReporter()))
    return folder


def tree(folder: Path) -> set[str]:
    """Every name, and where a link leads; without what SQLite has beside an open file and Python compiles."""
    return {
        f"{path.relative_to(folder)} -> {os.readlink(path)}"
        if path.is_symlink()
        else str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.name.endswith(("-wal", "-shm")) and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("name", STARTS)
def test_an_impossible_start_is_one_line_and_changes_nothing(
    name: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    case, folder = STARTS[name], tmp_path / "here"
    shutil.copytree(runs, folder, symlinks=True, ignore=shutil.ignore_patterns("link.ipc"))
    case.spoil(folder)
    config, before = (folder / "one" / "config.yaml").read_bytes(), tree(folder)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        app(["train", *case.arguments])
    said = "".join(capfd.readouterr())
    assert end.value.code == 2, said
    lines = said.splitlines()
    assert len(lines) == 1, said
    assert lines[0].startswith("error: ")
    assert [word for word in case.words if word not in lines[0]] == [], lines[0]
    assert (tree(folder) - before, before - tree(folder)) == (set(), set())
    assert (folder / "one" / "config.yaml").read_bytes() == config


def test_a_truncated_newest_checkpoint_is_named_and_the_one_before_it_used(
    runs: Path, tmp_path: Path
) -> None:
    run = tmp_path / "one"
    shutil.copytree(runs / "one", run, ignore=shutil.ignore_patterns("link.ipc"))
    weights = run / "checkpoints" / "step_0003" / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size // 2)
    command = start(tmp_path, "train", "--resume", "one", "--set=training.steps=4")
    assert command.wait() == 0, command.text()
    assert (
        f"step_0003 is not complete ({size // 2} of the {size} bytes of model.safetensors)" in command.text()
    )
    assert "the run continues from step 2" in command.text()
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    assert ask(run, "SELECT step FROM resumptions ORDER BY resumption") == [(0,), (2,)]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_lost"]) == (4, 0)
