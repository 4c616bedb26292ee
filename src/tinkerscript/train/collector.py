"""`Batch` holds the groups that a step or an evaluation waits for; `Collector` delivers outcomes to them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import NoSuccessError
from tinkerscript.ledger.rows import TrainedRow, Use, VerdictRow
from tinkerscript.protocol import failure_line
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.train.group_judge import GroupJudge
from tinkerscript.train.occupancy import Occupancy
from tinkerscript.trainer_link.messages import (
    JUDGE_FAILED,
    BatchProgress,
    EpisodeAccepted,
    EpisodeFailed,
    Outcome,
    usable,
)

BatchRule = Literal["groups", "differing_groups"]


# Clients may never fill their groups: above this size, the oldest is given up.
INCOMPLETE_BYTES = 2**30

HOPELESS_AFTER = 32


@dataclass
class Group:
    group_id: str
    size: int
    started: int = 0
    payload: Mapping[str, Any] = field(default_factory=dict[str, Any])
    outcomes: dict[str, Outcome | None] = field(default_factory=dict[str, Outcome | None])
    ended: int = 0
    is_judged: bool = True

    def add(self, outcome: Outcome) -> bool:
        """False for a duplicate or foreign episode."""
        if self.outcomes.get(outcome.episode_uuid, outcome) is not None:
            return False
        self.outcomes[outcome.episode_uuid] = outcome
        self.ended += 1
        return True

    @property
    def is_complete(self) -> bool:
        return self.ended >= self.size and self.is_judged

    @property
    def accepted(self) -> list[EpisodeAccepted]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, EpisodeAccepted)]

    def differs(self, *, by_call: bool) -> bool:
        return len({(each.reward_of(""), *(each.earned if by_call else ())) for each in self.accepted}) > 1


class Batch:
    def __init__(
        self, label: str, *, rule: BatchRule = "groups", needed: int = 0, by_call: bool = True
    ) -> None:
        """`rule`: which complete groups count; `needed`: how many (0: all)."""
        self.label = label
        self.groups: dict[str, Group] = {}
        self._rule: BatchRule = rule
        self._needed = needed
        self._by_call = by_call

    def plan(self, episode: PlannedEpisode, *, started: int = 0) -> Group:
        new = Group(episode.group_id, 0, started, episode.payload)
        group = self.groups.setdefault(episode.group_id, new)
        group.size += 1
        group.outcomes[episode.episode_uuid] = None
        return group

    def adopt(self, outcomes: Sequence[Outcome]) -> None:
        group = self.groups.setdefault(outcomes[0].group_id, Group(outcomes[0].group_id, 0))
        group.outcomes |= {outcome.episode_uuid: outcome for outcome in outcomes}
        group.size = group.ended = len(group.outcomes)

    def take(self, groups: Iterable[Group]) -> Batch:
        taken = Batch(self.label, rule=self._rule, needed=self._needed, by_call=self._by_call)
        taken.groups = {group.group_id: self.groups.pop(group.group_id) for group in list(groups)}
        return taken

    @property
    def outcomes(self) -> dict[str, Outcome]:
        found = (each for group in self.groups.values() for each in group.outcomes.items())
        return {uuid: outcome for uuid, outcome in found if outcome is not None}

    @property
    def payloads(self) -> dict[str, Mapping[str, Any]]:
        return {
            uuid: group.payload for group in self.groups.values() if group.payload for uuid in group.outcomes
        }

    @property
    def ended(self) -> int:
        return sum(group.ended for group in self.groups.values())

    @property
    def leftovers(self) -> list[str]:
        found = (each for group in self.groups.values() for each in group.outcomes.items())
        return [uuid for uuid, outcome in found if outcome is None]

    @property
    def counted(self) -> list[Group]:
        return [group for group in self.groups.values() if group.is_complete and self.counts(group)]

    def counts(self, group: Group) -> bool:
        return self._rule == "groups" or group.differs(by_call=self._by_call)

    @property
    def is_over(self) -> bool:
        return all(group.is_complete for group in self.groups.values())

    @property
    def is_met(self) -> bool:
        return len(self.counted) >= self._needed

    def progress(self, groups_ahead: dict[str, int]) -> BatchProgress:
        return BatchProgress(
            label=self.label,
            rule=self._rule,
            needed=self._needed or len(self.groups),
            have=len(self.counted),
            episodes_ended=self.ended,
            episodes_expected=sum(len(group.outcomes) for group in self.groups.values()),
            groups_ahead=groups_ahead,
        )

    def trainable(self, min_group: int) -> list[Group]:
        complete = [group for group in self.groups.values() if group.is_complete]
        return [group for group in complete if len(group.accepted) >= min_group]

    def check_success(self, own_clients: str = "") -> None:
        """Raise NoSuccessError if all episodes or the first `HOPELESS_AFTER` failed.

        The latter needs a failure at the run's own clients, because others may be broken while these start.
        """
        if any(group.accepted for group in self.groups.values()):
            return
        failed = [o for o in self.outcomes.values() if isinstance(o, EpisodeFailed) and not o.is_cancelled]
        is_hopeless = len(failed) >= HOPELESS_AFTER and any(
            str(failure.get("client_uuid")).startswith(own_clients) for o in failed for failure in o.failures
        )
        if failed and (is_hopeless or not self.leftovers):
            raise NoSuccessError(f"{self.label}: {_explain_failures(failed)}")


def _explain_failures(failed: Sequence[EpisodeFailed]) -> str:
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
    source: EpisodeSource
    progress: ProgressReporter
    group_size: int
    client_samples: bool = True
    seen: Callable[[Outcome], None] | None = None
    slots: int = 0
    scores: Collection[str] = ()
    check_for_teacher: Callable[[EpisodeAccepted], None] | None = None
    judge: GroupJudge | None = None

    def __post_init__(self) -> None:
        self._waiting: dict[str, Group] = {}

        self._running: dict[str, int] = {}

        # Clients' incomplete groups, oldest first, with their bytes.
        self._gathering: dict[str, list[Outcome]] = {}
        self._gathered: Counter[str] = Counter()

        self._ready: deque[list[Outcome]] = deque()

        self._to_judge: deque[tuple[Group, Callable[[], object]]] = deque()

        self._current: Batch | None = None
        self._received_number = 0
        self.received = 0
        self.rollouts = 0
        self.held = Occupancy()
        self._received = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Deliver outcomes. An error reaches everything that waits."""
        judging = set[asyncio.Task[None]]()
        try:
            while True:
                outcomes = await self.source.outcomes()
                if self.check_for_teacher is None:
                    self.receive(outcomes)
                else:  # It renders prompts, which must delay no model call.
                    self._take(await asyncio.to_thread(self._checked, outcomes))
                while self._to_judge:
                    task = asyncio.create_task(self._judged(*self._to_judge.popleft()))
                    judging.add(task)
                    task.add_done_callback(judging.discard)
        except Exception as error:
            self.fail(error)
            raise
        finally:
            for task in judging:
                task.cancel()
            await asyncio.gather(*judging, return_exceptions=True)

    async def _judged(self, group: Group, then: Callable[[], object]) -> None:
        """If the judge fails, the group fails."""
        assert self.judge is not None
        accepted, row = group.accepted, partial(VerdictRow, time=time.time())
        try:
            verdicts = await self.judge.verdicts(group.group_id, group.payload, accepted)
        except Exception as error:  # noqa: BLE001 - whatever a judge raises fails its group
            reason = failure_line(error)
            self.progress.note(f"group {group.group_id} is left out: its judge failed: {reason}")
            group.outcomes |= {each.episode_uuid: each.failed(JUDGE_FAILED, reason) for each in accepted}
            rows = [row(episode=each.sequence, reward=None, words=reason) for each in accepted]
        else:
            pairs = list(zip(accepted, verdicts, strict=True))
            group.outcomes |= {each.episode_uuid: each.judged(verdict.reward) for each, verdict in pairs}
            rows = [row(episode=each.sequence, reward=said.reward, words=said.words) for each, said in pairs]
        if not all(each.sequence in self.judge.known for each in accepted):
            self.source.note(rows)
        group.is_judged = True
        then()
        self._received.set()

    def _close(self, group: Group, then: Callable[[], object] = lambda: None) -> None:
        if self.judge is None or len(group.accepted) < 2:
            then()
            return
        group.is_judged = False
        self._to_judge.append((group, then))

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._received.set()

    def receive(self, outcomes: Sequence[Outcome]) -> None:
        self._take(self._checked(outcomes))

    def _checked(self, outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
        return [(each, usable(each, self.scores, self.check_for_teacher)) for each in outcomes]

    def _take(self, checked: Sequence[tuple[Outcome, Outcome]]) -> None:
        left_out = list[TrainedRow]()
        for result, outcome in checked:
            if isinstance(result, EpisodeAccepted) and isinstance(outcome, EpisodeFailed):
                reason = f"{why_failed(outcome)} from client {result.client_uuid!r}"
                self.progress.note(f"episode {result.episode_uuid} is kept but does not train: {reason}")
            if self.seen is not None:
                self.seen(outcome)
            self._received_number = max(self._received_number, outcome.number)
            step = self._running.pop(outcome.episode_uuid, 0)
            self.rollouts += bool(step) and outcome.episode_type == "train"
            if stray := self._deliver(outcome):
                left_out.append(
                    TrainedRow(episode=outcome.sequence, step=step, outcome=Use.LEFT_OUT, reason=stray)
                )
        self.received += 1
        self._count()
        if left_out:
            logger.info("episodes.left_out number=%d", len(left_out))
            self.source.note(left_out)
        self._received.set()

    def _deliver(self, outcome: Outcome) -> str:
        group = self._waiting.pop(outcome.episode_uuid, None)
        if group is not None:
            group.add(outcome)
            if group.is_complete and outcome.episode_type == "train":
                self._close(group)
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
        group = self._gathering.setdefault(outcome.group_id, [])
        group.append(outcome)
        self._gathered[outcome.group_id] += len(msgspec.msgpack.encode(outcome))
        if len(group) >= (outcome.group_size or self.group_size):
            del self._gathered[outcome.group_id]
            outcomes = {each.episode_uuid: each for each in self._gathering.pop(outcome.group_id)}
            whole = Group(outcome.group_id, len(outcomes), outcomes=dict(outcomes), ended=len(outcomes))
            self._close(whole, partial(self._make_ready, whole))
        while self._gathered.total() > INCOMPLETE_BYTES:
            self._give_up_oldest()

    def _make_ready(self, group: Group) -> None:
        self._ready.append([each for each in group.outcomes.values() if each is not None])
        if self._current is not None:
            self._tell(self._current, at_once=True)

    def _give_up_oldest(self) -> None:
        group_id = next(iter(self._gathering))
        del self._gathered[group_id]
        reason = f"its group {group_id!r} is incomplete, and later ones fill the trainer's memory"
        self.progress.note(f"a client's samples are left out: {reason}")
        left_out = partial(TrainedRow, step=0, outcome=Use.LEFT_OUT, reason=reason)
        self.source.note([left_out(episode=each.sequence) for each in self._gathering.pop(group_id)])

    async def open(self, batch: Batch, plans: Sequence[Sequence[PlannedEpisode]], *, step: int = 0) -> None:
        episodes = [episode for group in plans for episode in group]
        self.expect(batch, episodes, step=step)
        await self.source.start(episodes, step=step)

    def expect(self, batch: Batch, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        for episode in episodes:
            self._waiting[episode.episode_uuid] = batch.plan(episode, started=step - 1)
            self._running[episode.episode_uuid] = step
        self._count()

    async def until(
        self, is_met: Callable[[], bool], batch: Batch, more: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        """`more` returns whether it started a group. Raises NoSuccessError."""
        with self.progress.phase(batch.label, total=batch.ended + len(batch.leftovers)) as phase:
            seen = 0
            self._tell(batch, at_once=True)
            while not is_met():
                if more is not None and await more():
                    continue  # Outcomes may have arrived meanwhile.
                await self._wait_for_outcomes()
                phase.advance(batch.ended - seen)
                seen = batch.ended
                batch.check_success(self.source.own_clients)
                self._tell(batch)
        self._tell(None)

    async def filled(self, batch: Batch) -> None:
        with self.progress.phase(batch.label, total=0) as phase:
            while True:
                while self._ready and not batch.is_met:
                    group = self._ready.popleft()
                    batch.adopt(group)
                    phase.advance(len(group))
                self._tell(batch, at_once=True)
                if batch.is_met:
                    return
                await self._wait_for_outcomes()

    def _tell(self, batch: Batch | None, *, at_once: bool = False) -> None:
        self._current = batch
        ahead = Counter(group[0].pool for group in self._ready)
        self.source.collecting(batch and batch.progress(dict(ahead)), at_once=at_once)

    def give_up(self, episode_uuids: Sequence[str], reason: str) -> None:
        for uuid in episode_uuids:
            self._waiting.pop(uuid, None)
        self.source.cancel(episode_uuids, reason)

    async def received_until(self, number: int) -> None:
        while self._received_number < number:
            await self._wait_for_outcomes()

    def _count(self) -> None:
        self.held.number = min(self.slots or self.running, self.running)

    async def received_more(self, before: int) -> None:
        while self.received == before:
            await self._wait_for_outcomes()

    @property
    def running(self) -> int:
        return len(self._running)

    async def settled(self) -> None:
        while self._running:
            await self._wait_for_outcomes()

    async def _wait_for_outcomes(self) -> None:
        if self._failure is None:
            self._received.clear()
            await self._received.wait()
        if self._failure is not None:
            raise self._failure


def why_failed(outcome: EpisodeFailed) -> str:
    last = outcome.failures[-1] if outcome.failures else {}
    return f"{last.get('kind')}: {last.get('message')}"
