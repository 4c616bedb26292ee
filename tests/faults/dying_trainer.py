"""A run in one process that ends at a point of its second step.

An empty POINT lets it end by itself. A folder with a run is resumed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path

from plain_sums import SUMS
from short_runs import short_run
from tinkerscript.ledger.rows import CheckpointRow, PublicationRow, StepRow, TrainerRow
from tinkerscript.testing import QuietReporter
from tinkerscript.train.checkpoints import RunCheckpoints
from tinkerscript.train.identity import holds_run
from tinkerscript.train.run import run_training
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.trainer_link.trainer_end import TrainerLink

DEAD = 9
STEP = 2
POINTS = (
    "before publication",
    "after publication",
    "before step",
    "after step",
    "before weights",
    "before manifest",
    "after manifest",
    "after checkpoint",
)


class Dying:
    """Ends the process when it passes its point."""

    def __init__(self, point: str) -> None:
        self._point = point

    def at(self, point: str) -> None:
        if point == self._point:
            os._exit(DEAD)

    def install(self) -> None:
        """Pass every point on the way of the second step."""
        dying = self
        commit, write, seal = TrainerLink.commit, RunCheckpoints.write, RunFolder.seal
        names: dict[type[TrainerRow], str] = {
            PublicationRow: "publication",
            StepRow: "step",
            CheckpointRow: "checkpoint",
        }

        async def dying_commit(self: TrainerLink, rows: Collection[TrainerRow] = ()) -> None:
            passed = [names[type(row)] for row in rows if type(row) in names and row.step == STEP]
            for name in passed:
                dying.at(f"before {name}")
            await commit(self, rows)
            for name in passed:
                dying.at(f"after {name}")

        async def dying_write(self: RunCheckpoints, name: str) -> None:
            if name == f"step_{STEP:04d}":
                dying.at("before weights")
            await write(self, name)

        def dying_seal(self: RunFolder, name: str) -> None:
            if name == f"step_{STEP:04d}":
                dying.at("before manifest")
            seal(self, name)
            if name == f"step_{STEP:04d}":
                dying.at("after manifest")

        TrainerLink.commit, RunCheckpoints.write, RunFolder.seal = dying_commit, dying_write, dying_seal


def main(folder: Path, point: str) -> None:
    training = {
        "steps": 3,
        "groups_per_step": 2,
        "group_size": 4,
        "learning_rate": 5e-4,
        "checkpoint_every": 1,
    }
    config = short_run(folder, seed=5, task=SUMS, training=training, workers={"concurrency": 3})
    Dying(point).install()
    path = folder if holds_run(folder) else None
    asyncio.run(run_training(config, QuietReporter(), path=path))
