"""`GroupStream`: which groups of episodes start, and which of them a training step takes.

Invariant: a step gets complete groups whose episodes are fresh enough to train. The rest of its batch is left
out, and the ledger says why.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinkerscript.config import TrainingConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import NoSuccessError
from tinkerscript.ledger.history import History
from tinkerscript.train.collector import Batch, Collector
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.train.off_policy import AcceptedGroup, LagCounts, PolicyLags
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_rows import left_out_rows, set_aside_rows

MAX_TRIES = 4
"""Times `groups_per_step` that `differing_groups` registers at most: a task whose rewards hardly ever differ
should not hold a step up for good."""


@dataclass
class TrainingStep:
    """One training step, from a full batch to published weights."""

    number: int
    batch: Batch
    groups: list[AcceptedGroup]
    """Those with enough episodes that are fresh enough."""

    lags: LagCounts
    """Of the batch's episodes, of replayed ones, and of batches before it that were stale as a whole."""

    stale: Mapping[str, str]
    """Uuid of each episode that was too old -> why."""

    began: float
    """When the loop began to wait for its batch, on the monotonic clock; so in the next field. With
    `asynchronous` its episodes have started before."""

    collected: float = field(default_factory=time.monotonic)
    policy_version: int = -1
    """What the step published; before that, the version that it began with."""

    publish_s: float = 0.0
    cancelled: int = 0
    """Episodes that the batch had no use for when it closed."""

    @property
    def max_lag(self) -> int | None:
        return max((lag for lag in self.lags if lag is not None), default=None)


@dataclass
class GroupStream:
    """Starts the groups of each step, and hands it those that can train."""

    source: EpisodeSource
    collector: Collector
    progress: ProgressReporter
    config: TrainingConfig
    samples: TaskSamples | None
    """None if clients register their own, in which case groups come as they do."""

    lags: PolicyLags

    def __post_init__(self) -> None:
        self._open: dict[int, Batch] = {}
        """Step -> its batch, whose episodes have started."""

        self._interrupted: tuple[Batch, int] | None = None
        """The next step's batch in a resumed run, and how many of its groups were never registered."""

    def restore(self, history: History) -> None:
        """Wait again for the episodes of the batch that an interrupted run was collecting.

        Comes before anything is received: outcomes that wait at the server must find their batch.
        """
        if self.samples is None or not history.planned:
            return
        batch = self._batch(history.step + 1)
        planned_again = self.samples.planned_again
        episodes = [
            planned_again(plan.group_id, plan.position, episode_uuid=plan.episode_uuid)
            for plan in history.planned
        ]
        self.collector.expect(batch, episodes, step=history.step + 1)
        # A group that cannot train any more counts: the run would not have replaced it either.
        self._interrupted = batch, max(0, self._groups - history.planned_groups)

    async def start(self, step: int) -> None:
        """Start the groups of a step, unless they have started."""
        if step not in self._open:
            self._open[step] = await self._started(step)

    async def take(self, step: int, *, version: int) -> TrainingStep:
        """Wait for the step's groups, and for others while all results are too old to train. With
        `asynchronous`, the groups of the next step start then.

        `version`: of the policy that trains. If every episode fails, sets the batch aside and raises
        NoSuccessError.
        """
        began, lags = time.monotonic(), LagCounts()
        while True:
            await self.start(step)
            batch = self._open.pop(step)
            cancelled = await self._closed(batch, step)
            complete = batch.trainable(self.config.min_group)
            found = self.lags.fresh(((each.group_id, each.accepted) for each in complete), step=step - 1)
            lags.update(found.lags)
            if not found.all_stale:
                break
            self.source.note(left_out_rows(batch, step, stale=found.stale))
            self.progress.note(
                f"step {step}: all {len(found.stale)} results of the batch are stale and were discarded; "
                "collecting another one"
            )
        taken = TrainingStep(
            step,
            batch,
            found.groups,
            lags,
            stale=found.stale,
            began=began,
            policy_version=version,
            cancelled=cancelled,
        )
        if self.config.asynchronous and step < self.config.steps:
            await self.start(step + 1)
        return taken

    @property
    def _groups(self) -> int:
        return self.config.groups_per_step + self.config.extra_groups

    async def _started(self, step: int) -> Batch:
        """The batch of a step, with its episodes registered; in a resumed run, the interrupted one first."""
        (batch, missing), self._interrupted = self._interrupted or (self._batch(step), self._groups), None
        if self.samples is not None and missing:
            await self.collector.open(batch, self._plan(step, missing), step=step)
        return batch

    async def _closed(self, batch: Batch, step: int) -> int:
        """Wait until the batch has what its rule asks for; returns how many episodes were cancelled then."""
        if self.samples is None:
            await self.collector.filled(batch)
            return 0
        try:
            return await self.collector.closed(batch, lambda n: self._plan(step, n), step)
        except NoSuccessError as error:
            await self.source.commit(set_aside_rows(batch, step, str(error)))
            raise

    def _batch(self, step: int) -> Batch:
        config = self.config
        return Batch(
            f"step {step}",
            rule=config.batch_rule,
            groups=config.groups_per_step,
            group_size=config.group_size,
            max_groups=MAX_TRIES * config.groups_per_step,
            from_clients=self.samples is None,
        )

    def _plan(self, step: int, groups: int) -> list[list[PlannedEpisode]]:
        assert self.samples is not None
        return self.samples.train_groups(step=step, groups=groups, group_size=self.config.group_size)
