"""`Collector`: between the source of episodes and the batches that wait for them.

Invariant: an outcome is in the journal before it is acknowledged, and once it is there it belongs to one
batch or is counted as discarded. What a batch does not need any more is cancelled when it closes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from tinkerscript.dashboard.watcher import ProgressReporter
from tinkerscript.train.batch import Batch
from tinkerscript.train.journal import Discarded, EpisodeAccepted, EpisodeRegistered, Journal, Outcome
from tinkerscript.train.source import EpisodeSource, PlannedEpisode
from tinkerscript.waiting import Signal

logger = logging.getLogger(__name__)


class Collector:
    """Opens and closes batches; `run` receives outcomes until it is cancelled."""

    def __init__(
        self,
        source: EpisodeSource,
        journal: Journal,
        watcher: ProgressReporter,
        *,
        group_size: int,
        seen: Callable[[Outcome], None] | None = None,
    ) -> None:
        """`group_size`: of a client's group that does not say how many episodes it has; `seen`: is told of
        every new outcome.
        """
        self._source = source
        self._journal = journal
        self._watcher = watcher
        self._waiting: dict[str, Batch] = {}
        """Episode uuid -> the open batch that it belongs to."""

        self._group_size = group_size
        self._seen = seen
        self._gathering: dict[str, list[Outcome]] = {}
        """Groups of clients' own samples that are not complete yet."""

        self._ready: deque[list[Outcome]] = deque()
        """Complete ones that no batch has taken yet."""

        self._news = Signal()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Journal, acknowledge and hand out what ends. An error makes every waiting batch raise it."""
        try:
            while True:
                self.receive(await self._source.outcomes())
        except Exception as error:
            self._failure = error
            self._news.fire()
            raise

    def receive(self, outcomes: Sequence[Outcome]) -> None:
        """Journal, acknowledge and hand out these."""
        fresh = {o.episode_uuid: o for o in outcomes if not self._journal.ended(o.episode_uuid)}
        unplanned = [o for uuid, o in fresh.items() if uuid not in self._journal.registered]
        self._journal.write([*map(_registration, unplanned), *fresh.values()])
        self._source.acknowledge(outcomes)
        if self._seen is not None:
            for outcome in fresh.values():
                self._seen(outcome)
        strays = [outcome for outcome in fresh.values() if not self._deliver(outcome)]
        accepted = [o.episode_uuid for o in strays if isinstance(o, EpisodeAccepted)]
        if accepted:
            logger.info("episodes.discarded number=%d", len(accepted))
            self._journal.write(
                [Discarded(episode_uuids=accepted, reason="no batch waits for them any more")]
            )
        self._news.fire()

    def _deliver(self, outcome: Outcome) -> bool:
        batch = self._waiting.pop(outcome.episode_uuid, None)
        if batch is not None:
            return batch.add(outcome)
        if outcome.pool and outcome.episode_type == "train":
            self.gather(outcome)
        return bool(outcome.pool)  # A client's own evaluation is kept, and never trained on.

    def gather(self, outcome: Outcome) -> None:
        """An episode of a client's own sample ended; a group is ready when all of its episodes have."""
        group = self._gathering.setdefault(outcome.group_id, [])
        group.append(outcome)
        if len(group) >= (outcome.group_size or self._group_size):
            self._ready.append(self._gathering.pop(outcome.group_id))

    async def open(self, batch: Batch, plans: Sequence[Sequence[PlannedEpisode]], *, step: int = 0) -> None:
        """Register the groups of `plans` for `batch`."""
        episodes = [episode for group in plans for episode in group]
        self._journal.write(
            EpisodeRegistered(
                episode_uuid=episode.episode_uuid,
                episode_type=episode.episode_type,
                group_id=episode.group_id,
                step=step,
                position=episode.position,
            )
            for episode in episodes
            if episode.episode_uuid not in self._journal.registered
        )
        self.expect(batch, episodes)
        await self._source.start(episodes)

    def expect(self, batch: Batch, episodes: Sequence[PlannedEpisode]) -> None:
        """What these episodes come to belongs to `batch`."""
        for episode in episodes:
            batch.plan(episode.group_id, [episode.episode_uuid])
            self._waiting[episode.episode_uuid] = batch

    async def go_on(self, episodes: Sequence[PlannedEpisode]) -> None:
        """Let episodes run on that were registered before this trainer was there."""
        await self._source.start([e for e in episodes if not self._journal.ended(e.episode_uuid)])

    async def closed(
        self, batch: Batch, more: Callable[[int], Sequence[Sequence[PlannedEpisode]]], step: int
    ) -> int:
        """Wait until the batch has what it needs; returns how many episodes were cancelled then.

        `more(n)` plans n fresh groups when the rule asks for them.
        """
        with self._watcher.phase(batch.label, total=batch.ended + len(batch.leftovers)) as phase:
            seen = 0
            while not batch.is_met:
                if wanted := batch.fresh_groups_wanted:
                    await self.open(batch, more(wanted), step=step)
                    continue
                await self._more_news()
                phase.advance(batch.ended - seen)
                seen = batch.ended
        leftovers = batch.leftovers
        self.give_up(leftovers, f"{batch.label} has enough without this episode")
        return len(leftovers)

    async def filled(self, batch: Batch) -> None:
        """Wait until clients' own samples have filled the batch."""
        with self._watcher.phase(batch.label, total=0) as phase:
            while True:
                while self._ready and not batch.is_met:
                    for outcome in self._ready.popleft():
                        batch.adopt(outcome)
                        phase.advance(1)
                if batch.is_met:
                    return
                await self._more_news()

    def give_up(self, episode_uuids: Sequence[str], reason: str) -> None:
        """Cancel episodes that no batch needs any more."""
        for uuid in episode_uuids:
            self._waiting.pop(uuid, None)
        self._source.cancel(episode_uuids, reason)

    async def settled(self) -> None:
        """Return once every registered episode has its outcome in the journal."""
        while self._journal.unfinished():
            await self._more_news()

    async def _more_news(self) -> None:
        if self._failure is None:
            await self._news.wait()
        if self._failure is not None:
            raise self._failure


def _registration(outcome: Outcome) -> EpisodeRegistered:
    """Of a sample that a client registered itself."""
    return EpisodeRegistered(
        episode_uuid=outcome.episode_uuid, episode_type=outcome.episode_type, group_id=outcome.group_id
    )
