"""`GroupStream`: decides which groups start, and which a training step takes.

The rule is AReaL's (Fu et al. 2025, arXiv:2505.24298), in docs/training.md#synchronous-to-asynchronous.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from tinkerscript.config import TrainingConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import NoSuccessError
from tinkerscript.ledger.history import History
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.train.collector import Batch, Collector, Group
from tinkerscript.train.episode_source import EpisodeSource
from tinkerscript.train.off_policy import AcceptedGroup, LagCounts, PolicyLags
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_rows import left_out_rows, set_aside_rows

# `differing_groups` registers at most this many times `groups_per_step`, so equal rewards cannot block a
# step.
MAX_TRIES = 4


@dataclass
class TrainingStep:
    number: int
    batch: Batch
    groups: list[AcceptedGroup]
    lags: LagCounts
    stale: Mapping[str, str]
    began: float
    """When the wait started, in monotonic time."""

    collected: float = field(default_factory=time.monotonic)

    policy_version: int = -1
    """Published by the step; before that, the one that it began with."""

    publish_s: float = 0.0
    wait_stale_s: float | None = None

    sampling_share: float | None = None
    cancelled: int = 0

    @property
    def max_lag(self) -> int | None:
        return max((lag for lag in self.lags if lag is not None), default=None)


@dataclass
class GroupStream:
    source: EpisodeSource
    collector: Collector
    progress: ProgressReporter
    config: TrainingConfig
    samples: TaskSamples | None
    lags: PolicyLags

    def __post_init__(self) -> None:
        self._pool = self._batch("")
        self._behind = 0  # Training steps behind the published weights.
        self._next = 1
        self._extra = self.config.extra_groups

        # At lag 0, groups of an interrupted step that can no longer train, which an uninterrupted run would
        # not have replaced.
        self._lost = 0

    def restore(self, history: History) -> None:
        """Wait again for groups that an interrupted run had started. Call this before outcomes arrive."""
        self._behind, self._next = history.step, history.step + 1
        if self.samples is None:
            return
        for plan in history.planned:
            episode = self.samples.planned_again(plan.group_id, plan.position, episode_uuid=plan.episode_uuid)
            self.collector.expect(self._pool, [episode], step=plan.step)
        if not self.lags.max:
            self._lost = history.planned_groups - len(self._pool.groups)

    async def published(self, step: int) -> None:
        self._behind = step
        if self.lags.max:
            await self._start()

    async def take(self, step: int, *, version: int) -> TrainingStep:
        """Wait for the step's groups, and for another batch if all are too old.

        If every episode fails, sets the batch aside and raises NoSuccessError.
        """
        began, lags, stale = time.monotonic(), LagCounts(), dict[str, str]()
        while True:
            batch, waited = await self._taken(step)
            surplus = self._pool.take(self._surplus(step))
            cancelled = [*batch.leftovers, *surplus.leftovers]
            reason = f"{batch.label} has enough without this episode"
            self.collector.give_up(batch.leftovers, reason)
            self._leave_out(surplus, step, reason)
            complete = batch.trainable(self.config.min_group)
            found = self.lags.fresh(((each.group_id, each.accepted) for each in complete), step=step - 1)
            lags.update(found.lags)
            stale |= found.stale
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
            stale=stale,
            began=began,
            policy_version=version,
            wait_stale_s=waited,
            cancelled=len(cancelled),
        )
        self._next = step + 1
        if self.samples is not None and self.samples.curriculum is not None:
            for group in complete:
                self.samples.curriculum.note(group.payload, group.outcomes.values())
        if self.lags.max:
            await self._start()
        return taken

    def end(self) -> None:
        self._leave_out(self._pool, self._behind, "the run ended before a step could take its group")

    def _leave_out(self, batch: Batch, step: int, reason: str) -> None:
        self.collector.give_up(batch.leftovers, reason)
        left_out = partial(TrainedRow, step=step, outcome=Use.LEFT_OUT, reason=reason)
        if rows := [left_out(episode=each.sequence) for each in batch.outcomes.values()]:
            self.source.note(rows)

    async def _taken(self, step: int) -> tuple[Batch, float | None]:
        if self.samples is None:
            batch = self._batch(f"step {step}")
            await self.collector.filled(batch)
            return batch, None
        batch, waited = self._pool, None
        batch.label = f"step {step}"
        try:
            self._extra = self.config.extra_groups
            await self._start()
            if not self.lags.max:  # Extra groups start once.
                self._extra = 0
            await self.collector.until(lambda: self._has_enough, batch, self._start)
            if self.lags.max:
                waited = await self._wait_for_old(step)
            batch = self._pool.take(self._trains(step))
            batch.check_success()
        except NoSuccessError as error:
            await self.source.commit(set_aside_rows(batch, step, str(error)))
            raise
        self._lost = 0
        return batch, waited

    async def _wait_for_old(self, step: int) -> float:
        if not (old := self._awaited(step)):
            return 0.0
        began = time.monotonic()
        with self.progress.waiting(f"{len(old)} groups that would be too old after step {step}"):
            await self.collector.until(lambda: not self._awaited(step), self._pool, self._start)
        return time.monotonic() - began

    # The rule

    async def _start(self) -> bool:
        if not (room := self._room):
            return False
        assert self.samples is not None
        step, size = self._behind + 1, self.config.group_size
        plans = self.samples.train_groups(step=step, groups=room, group_size=size)
        await self.collector.open(self._pool, plans, step=step)
        return True

    @property
    def _room(self) -> int:
        left = self.config.steps + 1 - self._next
        if self.samples is None or left <= 0:
            return 0
        # A group that starts now can train up to step `_behind` + L + 1.
        steps = min(self._behind + self.lags.max + 2 - self._next, left)
        return max(0, steps * self.config.groups_per_step + self._extra - self._pending)

    @property
    def _pending(self) -> int:
        """Groups with a place in a step. Equal rewards need none, up to a limit."""
        equal = sum(each.is_complete and not self._pool.counts(each) for each in self._in_time)
        limit = (MAX_TRIES - 1) * self.config.groups_per_step
        return len(self._in_time) + self._lost - min(equal, limit)

    @property
    def _in_time(self) -> list[Group]:
        return [each for each in self._pool.groups.values() if self._last_step(each) >= self._next]

    @property
    def _drops(self) -> bool:
        return self.config.on_stale == "drop"

    def _last_step(self, group: Group) -> int:
        return group.started + self.lags.max + 1

    @property
    def _has_enough(self) -> bool:
        found = self._in_time
        counted = sum(each.is_complete and self._pool.counts(each) for each in found)
        is_over = all(each.is_complete for each in found) and not self._room
        is_judging = not self.lags.max and not all(each.is_judged for each in found)
        return is_over or (counted >= self.config.groups_per_step and not is_judging)

    def _trains(self, step: int) -> list[Group]:
        """At lag 0, all groups, including running ones."""
        groups = list(self._pool.groups.values())
        if not self.lags.max:
            return groups
        counted = [each for each in self._in_time if each.is_complete and self._pool.counts(each)]
        due = sum(self._last_step(each) == step for each in counted)
        most = max(due, self.config.groups_per_step) if self._drops else self.config.groups_per_step
        later = {each.group_id for each in counted[most:]}
        return [each for each in groups if each.is_complete and each.group_id not in later]

    def _surplus(self, step: int) -> list[Group]:
        """Extra groups that no later step can train."""
        if self._drops:
            return []
        return [each for each in self._pool.groups.values() if self._last_step(each) <= step]

    def _awaited(self, step: int) -> list[Group]:
        """Running groups that would be too old after the step, or the oldest of more than later steps can
        train.
        """
        if self._drops:
            return []
        taken = {each.group_id for each in self._trains(step)}
        behind = [each for each in self._pool.groups.values() if each.group_id not in taken]
        size, spare = self.config.groups_per_step, self.config.extra_groups
        too_many = 0
        for number, group in enumerate(behind, start=1):
            steps = max(0, self._last_step(group) - step)
            if number > steps * size + spare:
                too_many = number
        return [each for each in behind[:too_many] if not each.is_complete]

    def _batch(self, label: str) -> Batch:
        return Batch(
            label,
            rule=self.config.batch_rule,
            needed=self.config.groups_per_step,
            by_call=self.config.credit.level != "episode",
        )
