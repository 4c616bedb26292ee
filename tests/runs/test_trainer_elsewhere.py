"""A trainer that shares no folder with its server: real processes, TCP with keys, and kills of both ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import ROOT, Command, start
from run_ledger import rows, standing_steps
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger.rows import ResumptionRow

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
        """The last one that stands; 0: none has ended."""
        return max(standing_steps(self.server / "run"), default=0)


@pytest.fixture
def machines(tmp_path: Path) -> TwoMachines:
    (tmp_path / "server").mkdir()
    (tmp_path / "trainer").mkdir()
    return TwoMachines(tmp_path / "server", tmp_path / "trainer")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_outlives_kills_of_both_and_is_looked_at_where_its_ledger_is(machines: TwoMachines) -> None:
    serving = machines.serve()
    machines.copy_what_a_trainer_needs()
    training = machines.train("first.txt")
    training.until(lambda: machines.step() >= 1, seconds=PATIENCE_S)
    first, step = machines.server_pid(), machines.step()
    os.kill(first, signal.SIGKILL)
    serving.until(lambda: machines.server_pid() != first)
    training.until(lambda: machines.step() >= step + 3, seconds=PATIENCE_S)
    training.process.kill()
    training.process.wait()
    last = machines.step() + 2
    again = machines.train("again.txt", f"--set=training.steps={last}")
    assert again.wait(seconds=PATIENCE_S) == 0, again.text()
    for said in (training.text(), again.text()):
        assert "watch the run on the server's machine, where its ledger is: tinkerscript view FOLDER" in said
        assert "watch the run at" not in said
    assert "look at it again   tinkerscript view FOLDER, on the server's machine" in again.text()
    assert not (machines.trainer / "run" / LEDGER_FILE).exists()
    assert len(rows(machines.server / "run", ResumptionRow)) == 2
    assert standing_steps(machines.server / "run") == list(range(1, last + 1))
