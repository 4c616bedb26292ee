"""A trainer that shares no folder with its server: real processes, TCP with keys, and kills of both ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from command_line import ROOT, Command, end_all, start
from tinkerscript.errors import ConfigError
from tinkerscript.page.overview import overview
from tinkerscript.record.reader import Record
from tinkerscript.record.schema import RECORD_FILE

CONFIG: dict[str, Any] = {
    "experiment_dir": "run",
    "interchange_server": {
        "interchange_server_port": 0,
        "interchange_method": "tcp",
    },
    "task": {
        "name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
        "train_args": {"split": "train"},
        "eval_args": {"split": "test"},
    },
    "training": {"steps": 1000, "groups_per_step": 2, "group_size": 4, "checkpoint_every": 2},
    "evaluation": {"episodes": 4, "every_steps": 5, "interim_episodes": 2},
    "workers": {"count": 1, "concurrency": 8},
}


PATIENCE_S = 180


@dataclass
class TwoMachines:
    """A folder for each; only what a user copies is in both."""

    server: Path
    trainer: Path

    def serve(self) -> Command:
        (self.server / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        command = start(self.server, "serve", "config.yaml")
        command.until(lambda: "interchange server at" in command.text())
        return command

    def copy_what_a_trainer_needs(self) -> None:
        there, here = self.server / "run", self.trainer / "run"
        (here / "link_keys").mkdir(parents=True)
        for name in ("server.key", "trainer.key", "trainer.key_secret"):
            shutil.copy(there / "link_keys" / name, here / "link_keys" / name)
        shutil.copy(there / "config.yaml", here / "config.yaml")
        info = json.loads((there / "server.json").read_text()) | {"link_keys": str(here / "link_keys")}
        (here / "server.json").write_text(json.dumps(info))

    def train(self, output: str, *options: str) -> Command:
        (self.trainer / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        return start(self.trainer, "train", "config.yaml", "--join", "run", *options, output=output)

    def server_pid(self) -> int:
        return json.loads((self.server / "run" / "server.json").read_text())["pid"]

    def step(self) -> int:
        """The last one that the trainer has recorded; -1: it has not begun."""
        try:
            with closing(Record(self.trainer / "run")) as record:
                return record.facts().get("step", -1)
        except ConfigError:
            return -1


def read(url: str) -> dict[str, Any]:
    reply = httpx.get(url, timeout=60, verify=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def page_of(training: Command) -> str:
    """Where the trainer says first that its page is."""
    found = re.match(r"watch the run at (http://127\.0\.0\.1:\d+)", training.text())
    assert found, training.text()
    return found[1]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    (tmp_path / "server").mkdir()
    (tmp_path / "trainer").mkdir()
    yield TwoMachines(tmp_path / "server", tmp_path / "trainer")
    end_all()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_outlives_kills_of_both_and_has_its_page_with_the_trainer(machines: TwoMachines) -> None:
    serving = machines.serve()
    machines.copy_what_a_trainer_needs()
    training = machines.train("first.txt")
    training.until(lambda: machines.step() >= 1, seconds=PATIENCE_S)
    assert read(f"{page_of(training)}/api/runs/run")["state"] == "running"
    first, step = machines.server_pid(), machines.step()
    os.kill(first, signal.SIGKILL)
    serving.until(lambda: machines.server_pid() != first)
    training.until(lambda: machines.step() >= step + 3, seconds=PATIENCE_S)
    training.process.kill()
    training.process.wait()
    with closing(Record(machines.trainer / "run")) as record:
        last = int(record.number("SELECT max(step) FROM steps") or 0) + 2
    again = machines.train("again.txt", f"--set=training.steps={last}")
    assert again.wait(seconds=PATIENCE_S) == 0, again.text()
    record = Record(machines.trainer / "run")
    assert record.number("SELECT count(*) FROM resumes") == 2
    assert record.number("SELECT count(*) FROM steps") == last
    view = overview("run", record)
    assert (view.state, view.step) == ("finished", last)
    assert view.health.episodes == last * 8
    assert not (machines.server / "run" / RECORD_FILE).exists()
