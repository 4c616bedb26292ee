"""An `EpisodeSource` that runs no episodes and delivers what a test puts into it, and a collector of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from run_ledger import KeptRows
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.testing import QuietReporter
from tinkerscript.train.collector import Collector
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.trainer_link.messages import BatchProgress, Outcome


class ScriptedSource(KeptRows, EpisodeSource):
    """Delivers what the test puts into it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: asyncio.Queue[list[Outcome] | Exception] = asyncio.Queue()
        self.started: list[str] = []
        self.positions: list[int] = []
        self.steps: list[int] = []
        self.cancelled: list[str] = []
        self.reasons: list[str] = []
        """One for each call of `cancel`."""
        self.batches: list[BatchProgress | None] = []
        self.at_once: list[bool] = []

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        self.started += [episode.episode_uuid for episode in episodes]
        self.positions += [episode.position for episode in episodes]
        self.steps.append(step)

    async def outcomes(self) -> list[Outcome]:
        delivered = await self.queue.get()
        if isinstance(delivered, Exception):
            raise delivered
        return delivered

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        self.cancelled += episode_uuids
        self.reasons.append(reason)

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        self.batches.append(batch)
        self.at_once.append(at_once)

    @property
    def left_out(self) -> list[tuple[int, int, str]]:
        """Sequence, step and reason of each episode that the ledger was told is left out."""
        assert {row.outcome for row in self.of(TrainedRow)} <= {Use.LEFT_OUT}
        return [(row.episode, row.step, row.reason) for row in self.of(TrainedRow)]


@asynccontextmanager
async def collecting(**options: Any) -> AsyncGenerator[tuple[Collector, ScriptedSource]]:
    """A collector that runs. `options`: of `Collector`."""
    source = ScriptedSource()
    collector = Collector(source, QuietReporter(), group_size=2, **options)
    running = asyncio.create_task(collector.run())
    try:
        async with asyncio.timeout(10):
            yield collector, source
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
