"""From outcomes to batches: `Batch` says which episodes a step or an evaluation waits for, and `Collector`
hands it their outcomes.

Invariants: an outcome belongs to one batch, or the ledger says that it was left out. Episodes are tracked by
id, not counted, so an outcome that belongs to another batch changes nothing. When a batch closes, the
episodes that it no longer needs are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import NoSuccessError
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.trainer_link.messages import (
    BatchProgress,
    EpisodeAccepted,
    EpisodeFailed,
    Outcome,
    usable,
)

BatchRule = Literal["groups", "differing_groups"]


INCOMPLETE_BYTES = 2**30
"""Of outcomes in clients' groups that are incomplete. Beyond it the oldest group is given up: a client may
register groups that never fill."""

HOPELESS_AFTER = 32
"""Failed episodes without one success after which a batch is not waited for any longer."""


@dataclass
class Group:
    """The episodes of one sample."""

    group_id: str
    size: int
    """Episodes in all."""

    outcomes: dict[str, Outcome | None] = field(default_factory=dict[str, Outcome | None])
    """By episode uuid; None while the episode runs."""

    ended: int = 0

    @property
    def is_complete(self) -> bool:
        return self.ended >= self.size

    @property
    def accepted(self) -> list[EpisodeAccepted]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, EpisodeAccepted)]

    @property
    def differs(self) -> bool:
        """Whether the group carries a gradient: its accepted episodes' rewards differ."""
        return len({outcome.reward_of("") for outcome in self.accepted}) > 1


class Batch:
    """The groups of one step or evaluation, and the rule that decides when the batch is complete."""

    def __init__(
        self,
        label: str,
        *,
        rule: BatchRule,
        groups: int,
        group_size: int,
        max_groups: int = 0,
        from_clients: bool = False,
    ) -> None:
        """`max_groups`: the limit for the rule `differing_groups` (0: `groups`); `from_clients`: groups are
        not planned, they arrive as clients register them.
        """
        self.label = label
        self.groups: dict[str, Group] = {}
        self._rule: BatchRule = rule
        self._needed = groups
        self._group_size = group_size
        self._max_groups = max_groups or groups
        self._from_clients = from_clients
        self._group_of: dict[str, Group] = {}
        self.payloads: dict[str, Mapping[str, Any]] = {}
        """Episode uuid -> payload; without clients' own samples."""

        self.ended = 0
        """Episodes with an outcome."""

        self._accepted = self._complete = self._differing = 0

    def plan(self, group_id: str, episode_uuids: Iterable[str]) -> None:
        """Also wait for these episodes of the group."""
        uuids = list(episode_uuids)
        group = self.groups.setdefault(group_id, Group(group_id, 0))
        group.size += len(uuids)
        group.outcomes.update(dict.fromkeys(uuids))
        self._group_of.update(dict.fromkeys(uuids, group))

    def add(self, outcome: Outcome) -> bool:
        """Add an outcome; False if it is a duplicate or its episode is not in this batch."""
        group = self._group_of.get(outcome.episode_uuid)
        if group is None or group.outcomes[outcome.episode_uuid] is not None:
            return False
        self._take(group, outcome)
        return True

    def adopt(self, outcome: Outcome) -> None:
        """Add an outcome without a plan: the episode of a sample that a client registered."""
        size = outcome.group_size or self._group_size
        group = self.groups.setdefault(outcome.group_id, Group(outcome.group_id, size))
        self._group_of[outcome.episode_uuid] = group
        self._take(group, outcome)

    def _take(self, group: Group, outcome: Outcome) -> None:
        group.outcomes[outcome.episode_uuid] = outcome
        group.ended += 1
        self.ended += 1
        self._accepted += isinstance(outcome, EpisodeAccepted)
        if group.ended == group.size:
            self._complete += 1
            self._differing += group.differs

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """By episode uuid, of the episodes that ended."""
        found = (group.outcomes[uuid] for uuid, group in self._group_of.items())
        return {outcome.episode_uuid: outcome for outcome in found if outcome is not None}

    @property
    def leftovers(self) -> list[str]:
        """Episodes that are still running."""
        return [uuid for uuid, group in self._group_of.items() if group.outcomes[uuid] is None]

    def progress(self, groups_ahead: dict[str, int]) -> BatchProgress:
        """How far it is. `groups_ahead`: complete groups of each pool that wait for a later batch."""
        return BatchProgress(
            label=self.label,
            rule=self._rule,
            needed=self._needed,
            have=self._have,
            episodes_ended=self.ended,
            episodes_expected=len(self._group_of),
            groups_ahead=groups_ahead,
        )

    @property
    def is_met(self) -> bool:
        """Whether the batch has enough, or nothing is left to wait for."""
        if self._have >= self._needed:
            return True
        runs_out = self.ended == len(self._group_of) and not self.replacements_needed
        return runs_out and not self._from_clients

    @property
    def _have(self) -> int:
        return self._complete if self._rule == "groups" else self._differing

    @property
    def replacements_needed(self) -> int:
        """Groups to register as replacements of complete ones whose rewards are all equal."""
        if self._rule != "differing_groups":
            return 0
        promising = len(self.groups) - self._complete + self._differing
        return max(0, min(self._needed - promising, self._max_groups - len(self.groups)))

    def trainable(self, min_group: int) -> list[Group]:
        """The groups that can train: complete ones with `min_group` accepted episodes."""
        complete = [group for group in self.groups.values() if group.is_complete]
        return [group for group in complete if len(group.accepted) >= min_group]

    def check_success(self, own_clients: str = "") -> None:
        """Raises NoSuccessError, with the reasons, if every episode failed, or the first `HOPELESS_AFTER`.

        Of those, one must have failed at a client whose uuid begins with `own_clients`: those of others may
        be broken, and the run's own still at their start.
        """
        if self._accepted or self._from_clients:
            return
        failed = [o for o in self.outcomes.values() if isinstance(o, EpisodeFailed) and not o.is_cancelled]
        is_hopeless = len(failed) >= HOPELESS_AFTER and any(
            str(failure.get("client_uuid")).startswith(own_clients) for o in failed for failure in o.failures
        )
        if failed and (is_hopeless or not self.leftovers):
            raise NoSuccessError(f"{self.label}: {_explain_failures(failed)}")


def _explain_failures(failed: Sequence[EpisodeFailed]) -> str:
    """The most common last failures, each with an example. Those that differ only in numbers count as one."""
    alike: dict[str, list[str]] = {}
    for episode in failed:
        reason = why_failed(episode)
        client = episode.failures[-1].get("client_uuid") if episode.failures else None
        example = f"{reason} ({episode.group_id}, {client})"
        alike.setdefault(re.sub(r"\d+", "0", reason), []).append(example)
    common = sorted(alike.values(), key=len, reverse=True)
    lines = [f"  {len(examples)} x {examples[0]}" for examples in common[:3]]
    if len(common) > 3:
        lines.append(f"  and {len(common) - 3} other reasons")
    return "\n".join([f"all {len(failed)} episodes that ended failed:", *lines])


logger = logging.getLogger(__name__)


@dataclass
class Collector:
    """Opens and closes batches; `run` receives outcomes until it is cancelled."""

    source: EpisodeSource
    progress: ProgressReporter
    group_size: int
    """For clients' groups that do not state one."""

    client_samples: bool = True
    """Whether clients' own samples train."""

    seen: Callable[[Outcome], None] | None = None
    """Gets every new outcome."""

    def __post_init__(self) -> None:
        self._waiting: dict[str, Batch] = {}
        """Episode uuid -> the open batch that it belongs to."""

        self._running: dict[str, int] = {}
        """Uuid of each planned episode that has not ended -> its step; 0: an evaluation's."""

        self._gathering: dict[str, list[Outcome]] = {}
        """Groups of clients' own samples that are still incomplete, oldest first."""

        self._gathered: Counter[str] = Counter()
        """The bytes of each."""

        self._ready: deque[list[Outcome]] = deque()
        """Complete ones that no batch has taken yet."""

        self._current: Batch | None = None
        """The batch that was told of last."""

        self._received_number = 0
        """The last end number that came."""

        self._received = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Receive outcomes until cancelled. If this fails, every waiting batch raises the error."""
        try:
            while True:
                self.receive(await self.source.outcomes())
        except Exception as error:
            self._failure = error
            self._received.set()
            raise

    def receive(self, outcomes: Sequence[Outcome]) -> None:
        """Deliver outcomes to their batches. The ledger is told of those that nobody waits for."""
        left_out = list[TrainedRow]()
        for result in outcomes:
            outcome = usable(result)
            if isinstance(result, EpisodeAccepted) and isinstance(outcome, EpisodeFailed):
                reason = f"{why_failed(outcome)} from client {result.client_uuid!r}"
                self.progress.note(f"episode {result.episode_uuid} is kept and does not train: {reason}")
            if self.seen is not None:
                self.seen(outcome)
            self._received_number = max(self._received_number, outcome.number)
            step = self._running.pop(outcome.episode_uuid, 0)
            if stray := self._deliver(outcome):
                left_out.append(
                    TrainedRow(episode=outcome.sequence, step=step, outcome=Use.LEFT_OUT, reason=stray)
                )
        if left_out:
            logger.info("episodes.left_out number=%d", len(left_out))
            self.source.note(left_out)
        self._received.set()

    def _deliver(self, outcome: Outcome) -> str:
        """Give an outcome to its batch; why it has none, or empty."""
        batch = self._waiting.pop(outcome.episode_uuid, None)
        if batch is not None:
            batch.add(outcome)
            return ""
        if not outcome.pool:
            return (
                "no batch is waiting for it" if isinstance(outcome, EpisodeAccepted) else why_failed(outcome)
            )
        if outcome.episode_type != "train":
            return "an evaluation of a client's own"
        if not self.client_samples:
            return "the run trains on the samples of its task, not on clients' own"
        self.gather(outcome)
        return ""

    def gather(self, outcome: Outcome) -> None:
        """Take an episode of a client's own sample; its group is ready once all of its episodes have
        ended."""
        group = self._gathering.setdefault(outcome.group_id, [])
        group.append(outcome)
        self._gathered[outcome.group_id] += len(msgspec.msgpack.encode(outcome))
        if len(group) >= (outcome.group_size or self.group_size):
            del self._gathered[outcome.group_id]
            self._ready.append(self._gathering.pop(outcome.group_id))
            if self._current is not None:
                self._tell(self._current, at_once=True)
        while self._gathered.total() > INCOMPLETE_BYTES:
            self._give_up_oldest()

    def _give_up_oldest(self) -> None:
        group_id = next(iter(self._gathering))
        del self._gathered[group_id]
        reason = f"its group {group_id!r} is incomplete, and later ones fill the trainer's memory"
        self.progress.note(f"client's samples are left out: {reason}")
        left_out = partial(TrainedRow, step=0, outcome=Use.LEFT_OUT, reason=reason)
        self.source.note([left_out(episode=each.sequence) for each in self._gathering.pop(group_id)])

    async def open(self, batch: Batch, plans: Sequence[Sequence[PlannedEpisode]], *, step: int = 0) -> None:
        """Register the groups of `plans` for `batch`."""
        episodes = [episode for group in plans for episode in group]
        self.expect(batch, episodes, step=step)
        await self.source.start(episodes, step=step)

    def expect(self, batch: Batch, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        """Deliver the outcomes of these episodes to `batch`, which is for `step`."""
        for episode in episodes:
            batch.plan(episode.group_id, [episode.episode_uuid])
            batch.payloads[episode.episode_uuid] = episode.payload
            self._waiting[episode.episode_uuid] = batch
            self._running[episode.episode_uuid] = step

    async def closed(
        self, batch: Batch, more: Callable[[int], Sequence[Sequence[PlannedEpisode]]], step: int
    ) -> int:
        """Wait until the batch has enough, then cancel the rest; returns how many were cancelled.

        `more(n)` plans n fresh groups if the batch asks for them. Raises NoSuccessError if every episode
        failed.
        """
        with self.progress.phase(batch.label, total=batch.ended + len(batch.leftovers)) as phase:
            seen = 0
            self._tell(batch, at_once=True)
            while not batch.is_met:
                if wanted := batch.replacements_needed:
                    await self.open(batch, more(wanted), step=step)
                    continue
                await self._wait_for_outcomes()
                phase.advance(batch.ended - seen)
                seen = batch.ended
                batch.check_success(self.source.own_clients)
                self._tell(batch)
        batch.check_success()
        self._tell(None)
        leftovers = batch.leftovers
        self.give_up(leftovers, f"{batch.label} has enough without this episode")
        return len(leftovers)

    async def filled(self, batch: Batch) -> None:
        """Wait until clients' own samples have filled the batch."""
        with self.progress.phase(batch.label, total=0) as phase:
            while True:
                while self._ready and not batch.is_met:
                    for outcome in self._ready.popleft():
                        batch.adopt(outcome)
                        phase.advance(1)
                self._tell(batch, at_once=True)
                if batch.is_met:
                    return
                await self._wait_for_outcomes()

    def _tell(self, batch: Batch | None, *, at_once: bool = False) -> None:
        """Tell who runs episodes how far the batch is."""
        self._current = batch
        ahead = Counter(group[0].pool for group in self._ready)
        self.source.collecting(batch and batch.progress(dict(ahead)), at_once=at_once)

    def give_up(self, episode_uuids: Sequence[str], reason: str) -> None:
        """Cancel episodes that no batch needs."""
        for uuid in episode_uuids:
            self._waiting.pop(uuid, None)
        self.source.cancel(episode_uuids, reason)

    async def received_until(self, number: int) -> None:
        """Wait until all outcomes up to this end number have come."""
        while self._received_number < number:
            await self._wait_for_outcomes()

    async def settled(self) -> None:
        """Wait until every planned episode has ended."""
        while self._running:
            await self._wait_for_outcomes()

    async def _wait_for_outcomes(self) -> None:
        if self._failure is None:
            self._received.clear()
            await self._received.wait()
        if self._failure is not None:
            raise self._failure


def why_failed(outcome: EpisodeFailed) -> str:
    """Its last failure, with the kind."""
    last = outcome.failures[-1] if outcome.failures else {}
    return f"{last.get('kind')}: {last.get('message')}"
