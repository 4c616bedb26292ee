"""The feed of one task's eval: samples go in while it runs, outcomes come out.

Invariant: `on_ended` is called when Inspect has stopped asking for samples, whatever the reason, so that
nobody waits for a task that is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from inspect_ai import SampleSource, enqueue_sample
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample

from inspect_tinker_bridge.episodes import EpisodeOutcome, Episodes
from inspect_tinker_bridge.errors import EpisodeAbandonedError, RunnerError


class Feed(SampleSource):
    """Feeds the eval. `next_samples` is awaited only while the eval is idle, so every submission wakes it."""

    def __init__(self, episodes: Episodes) -> None:
        self.started = asyncio.Event()
        self.on_started: Callable[[], None] = lambda: None
        self.on_ended: Callable[[], None] = lambda: None
        self._episodes = episodes
        self._context: Context | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._running = 0

    @property
    def busy(self) -> bool:
        """Whether Inspect still works on a sample, abandoned ones included."""
        return self._running > 0

    def submit(self, sample: Sample, epoch: int) -> None:
        """Hand a sample over. `enqueue_sample` works in the eval's own context only; its copies may nest."""
        if self._context is None:
            raise RunnerError("the eval has not started")
        self._context.copy().run(enqueue_sample, sample, epoch=epoch)
        self._running += 1
        self._wake.set()

    def close(self) -> None:
        """Let the eval end once it is idle."""
        self._closed = True
        self._wake.set()

    async def next_samples(self) -> list[Sample] | None:
        if self._context is None:
            self._context = copy_context()
            feeder: asyncio.Task[Any] | None = asyncio.current_task()
            if feeder is not None:
                feeder.add_done_callback(lambda _: self.on_ended())
            self.on_started()
            self.started.set()
        await self._wake.wait()
        self._wake.clear()
        return None if self._closed else []

    async def sample_complete(self, sample: EvalSample) -> None:
        self._running -= 1
        episode = self._episodes.get(sample.epoch)
        if episode is not None:
            episode.end(EpisodeOutcome.of(sample))

    async def sample_abandoned(self, sample: Sample, epoch: int) -> None:
        self._running -= 1
        episode = self._episodes.get(epoch)
        if episode is not None:
            episode.abandon(EpisodeAbandonedError(f"Inspect dropped the sample {sample.id!r} before it ran"))
