"""Outcomes find their batch; what nobody waits for is journalled, acknowledged and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from failing_store import VICTIM, planted
from interchange_helpers import until
from rollout_helpers import make_accepted, make_call
from tinkerscript.config import TrainingConfig
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.testing import QuietReporter
from tinkerscript.train.collector import MAX_TRIES, Batch, Collector, StepBatches
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.train.history import History
from tinkerscript.train.journal import Discarded, EpisodeRegistered, Journal, read_journal
from tinkerscript.train.recorder import RunRecorder
from tinkerscript.trainer_link.messages import BatchProgress, EpisodeAccepted, EpisodeFailed, Outcome


class ScriptedSource(EpisodeSource):
    """Delivers what the test puts into it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[list[Outcome] | Exception] = asyncio.Queue()
        self.started: list[str] = []
        self.positions: list[int] = []
        self.acknowledged: list[str] = []
        self.cancelled: list[str] = []
        self.reasons: list[str] = []
        """One for each call of `cancel`."""
        self.journal: Path | None = None
        """What is acknowledged must be in this file."""
        self.batches: list[BatchProgress | None] = []
        self.at_once: list[bool] = []

    async def start(self, episodes: Sequence[PlannedEpisode]) -> None:
        self.started += [episode.episode_uuid for episode in episodes]
        self.positions += [episode.position for episode in episodes]

    async def outcomes(self) -> list[Outcome]:
        delivered = await self.queue.get()
        if isinstance(delivered, Exception):
            raise delivered
        return delivered

    def acknowledge(self, outcomes: Sequence[Outcome]) -> None:
        if self.journal is not None:
            written = [event for event in read_journal(self.journal) if isinstance(event, EpisodeAccepted)]
            assert {each.episode_uuid for each in outcomes} <= {event.episode_uuid for event in written}
        self.acknowledged += [outcome.episode_uuid for outcome in outcomes]

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        self.cancelled += episode_uuids
        self.reasons.append(reason)

    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        raise AssertionError("not used here")

    def collecting(self, batch: BatchProgress | None, *, at_once: bool = False) -> None:
        self.batches.append(batch)
        self.at_once.append(at_once)


def accepted(uuid: str, *, group: str = "g", pool: str = "", size: int = 0) -> EpisodeAccepted:
    return make_accepted(uuid, float(len(uuid)), group_id=group, group_size=size, pool=pool)


def plans(*uuids: str, group: str = "g") -> list[PlannedEpisode]:
    return [PlannedEpisode("train", group, {}, episode_uuid=uuid) for uuid in uuids]


@asynccontextmanager
async def collecting(
    tmp_path: Path, *, client_samples: bool = True
) -> AsyncGenerator[tuple[Collector, ScriptedSource, Journal]]:
    source = ScriptedSource()
    with Journal(tmp_path / "journal.jsonl") as journal, RecordWriter(tmp_path / RECORD_FILE) as record:
        collector = Collector(
            source,
            journal,
            QuietReporter(),
            group_size=2,
            client_samples=client_samples,
            recorder=RunRecorder(record, "all"),
        )
        running = asyncio.create_task(collector.run())
        async with asyncio.timeout(10):
            yield collector, source, journal
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_outcome_is_journalled_before_it_is_acknowledged(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, source, journal):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        source.journal = tmp_path / "journal.jsonl"
        await collector.open(batch, [plans("a", "b")], step=1)
        source.queue.put_nowait([accepted("a"), accepted("b")])
        assert await collector.closed(batch, lambda n: [], 1) == 0
        assert source.acknowledged == ["a", "b"]
        await collector.settled()
        events = read_journal(tmp_path / "journal.jsonl")
        assert [isinstance(event, EpisodeRegistered) for event in events] == [True, True, False, False]
        # Delivered again, as after an acknowledgement that got lost: acknowledged again, and nothing else.
        source.queue.put_nowait([accepted("a")])
        await until(lambda: source.acknowledged == ["a", "b", "a"])
        assert len(read_journal(tmp_path / "journal.jsonl")) == 4
        assert journal.discarded == 0


async def test_what_a_batch_does_not_need_is_cancelled_and_still_counted(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, source, journal):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b"), plans("c", "d", group="h")], step=1)
        source.queue.put_nowait([accepted("a"), accepted("b")])
        assert await collector.closed(batch, lambda n: [], 1) == 2
        assert source.cancelled == ["c", "d"]
        assert source.reasons == ["step 1 has enough without this episode"]
        cancelled = EpisodeFailed(episode_uuid="c", failures=[{"kind": "cancelled"}])
        source.queue.put_nowait([cancelled, accepted("d", group="h")])
        await collector.settled()
        assert (journal.cancelled, journal.discarded) == (1, 1)
        assert batch.outcomes.keys() == {"a", "b"}


def orphans(uuid: str) -> EpisodeAccepted:
    """A result with a call that goes on from one which is not there."""
    first = make_call(None, [1, 2], [3])
    return msgspec.structs.replace(accepted(uuid), all_calls=[make_call(first, [4], [5])])


UNUSABLE = {
    "reward_out_of_bounds": (msgspec.structs.replace(accepted("a"), reward=1.7e308), "got 1.7e+308"),
    "calls_unreadable": (orphans("a"), "is not among the calls before it"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_a_result_that_cannot_train_is_kept_and_named_and_is_a_failure_to_its_batch(
    tmp_path: Path, kind: str
) -> None:
    result, reason = UNUSABLE[kind]
    async with collecting(tmp_path) as (collector, source, journal):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        source.queue.put_nowait([result, accepted("b")])
        await collector.closed(batch, lambda n: [], 1)
        assert source.acknowledged == ["a", "b"]
        assert [outcome.episode_uuid for outcome in batch.groups["g"].accepted] == ["b"]
        failed = batch.outcomes["a"]
        assert isinstance(failed, EpisodeFailed)
        assert failed.failures[-1]["kind"] == kind
        assert (journal.outcomes["a"], journal.discarded) == ("accepted", 1)
        kept = read_journal(tmp_path / "journal.jsonl")
        rewards = [event.reward for event in kept if isinstance(event, EpisodeAccepted)]
        assert rewards == [result.reward, 1.0]
        assert f"{reason} from client 'w'" in next(e.reason for e in kept if isinstance(e, Discarded))


async def test_an_episode_that_cannot_be_recorded_trains_all_the_same_and_so_do_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RecordWriter, "episode", planted(RecordWriter.episode, "record"))
    async with collecting(tmp_path) as (collector, source, _):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans(VICTIM, "b")], step=1)
        source.queue.put_nowait([accepted(VICTIM), accepted("b")])
        await collector.closed(batch, lambda n: [], 1)
        assert len(batch.groups["g"].accepted) == 2
    assert f"record.entry_dropped episode={VICTIM}" in caplog.text


async def test_groups_of_clients_that_end_in_turns_are_kept_whole(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, source, journal):
        for uuid, group in (("a", "A"), ("b", "B"), ("aa", "A"), ("bb", "B")):
            source.queue.put_nowait([accepted(uuid, group=group, pool="w")])
        for expected in ({"a", "aa"}, {"b", "bb"}):
            batch = Batch("step", rule="groups", groups=1, group_size=2, from_clients=True)
            await collector.filled(batch)
            assert batch.outcomes.keys() == expected
        assert journal.discarded == 0
        assert journal.registered.keys() == {"a", "b", "aa", "bb"}


async def test_the_batch_that_is_filled_and_who_is_ahead_of_it_is_told(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, source, _):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2, from_clients=True)
        filling = asyncio.create_task(collector.filled(batch))
        await until(lambda: bool(source.batches))
        for group in ("A", "B", "C"):
            both = [accepted(f"{group}{number}", group=group, pool="w") for number in range(2)]
            source.queue.put_nowait(list(both))
        await filling
        await until(lambda: source.queue.empty() and told(source.batches[-1]) == (1, 1, {"w": 2}))
        assert told(source.batches[0]) == (0, 1, {})
        assert set(source.at_once) == {True}, "who is ahead waits for it"
        source.at_once.clear()
        planned = Batch("step 2", rule="groups", groups=1, group_size=2)
        await collector.open(planned, [plans("p", "q")], step=2)
        source.queue.put_nowait([accepted("p"), accepted("q")])
        await collector.closed(planned, lambda n: [], 2)
        assert (source.batches[-1], source.batches[-2] and told(source.batches[-2])) == (
            None,
            (1, 1, {"w": 2}),
        )
        assert (source.at_once[0], set(source.at_once[1:])) == (True, {False}), "then with each heartbeat"


def told(batch: BatchProgress | None) -> tuple[int, int, dict[str, int]]:
    assert batch is not None
    return batch.have, batch.needed, batch.groups_ahead


async def test_clients_own_samples_are_discarded_by_name_where_a_task_trains(tmp_path: Path) -> None:
    async with collecting(tmp_path, client_samples=False) as (collector, source, journal):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        theirs = [accepted(uuid, group="w/g", pool="w", size=2) for uuid in ("c", "d")]
        source.queue.put_nowait([*theirs, accepted("a"), accepted("b")])
        await collector.closed(batch, lambda n: [], 1)
        assert (batch.outcomes.keys(), journal.discarded) == ({"a", "b"}, 2)
        assert journal.count("train", "accepted") == 4
        assert journal.count("train", "accepted", planned_only=True) == 2, "what could train"
        (discarded,) = [e for e in read_journal(tmp_path / "journal.jsonl") if isinstance(e, Discarded)]
        assert "not on clients' own" in discarded.reason


async def test_an_error_of_the_source_reaches_who_waits(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, source, _):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        source.queue.put_nowait(RuntimeError("the link broke"))
        with pytest.raises(RuntimeError, match="the link broke"):
            await collector.closed(batch, lambda n: [], 1)


async def test_what_cannot_be_journalled_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(events: object) -> None:
        raise OSError("no space left on device")

    async with collecting(tmp_path) as (collector, source, journal):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        monkeypatch.setattr(journal, "write", full_disk)
        source.queue.put_nowait([accepted("a"), accepted("b")])
        with pytest.raises(OSError, match="no space left"):
            await collector.closed(batch, lambda n: [], 1)
        assert (source.acknowledged, batch.ended) == ([], 0)


class Samples:
    """Plans episodes as `TaskSamples` does, without a task."""

    def __init__(self) -> None:
        self.position = 0

    def train_groups(self, *, step: int, groups: int, group_size: int) -> list[list[PlannedEpisode]]:
        self.position += groups
        names = [f"{step}.{self.position - groups + number}" for number in range(groups)]
        return [
            [
                PlannedEpisode("train", name, {}, position=n, episode_uuid=f"{name}.{n}")
                for n in range(group_size)
            ]
            for name in names
        ]

    def planned_again(self, group_id: str, position: int, **more: str) -> PlannedEpisode:
        return PlannedEpisode("train", group_id, {}, position=position, **more)


async def test_a_step_opens_its_groups_and_the_extra_ones_and_cancels_what_is_left(tmp_path: Path) -> None:
    config = TrainingConfig(steps=2, groups_per_step=2, extra_groups=1, group_size=2)
    async with collecting(tmp_path) as (collector, source, journal):
        batches = StepBatches(collector, config, Samples())
        batch = await batches.open(2)
        assert source.started == [f"2.{group}.{number}" for group in range(3) for number in range(2)]
        assert {plan.step for plan in journal.registered.values()} == {2}
        source.queue.put_nowait([accepted(uuid) for uuid in source.started[:4]])
        assert await batches.close(batch, 2) == 2
        assert source.cancelled == ["2.2.0", "2.2.1"]
        assert (await batches.open(3)).leftovers == [], "there is no such step"
        assert len(source.started) == 6


async def test_groups_without_a_difference_are_replaced_up_to_the_limit(tmp_path: Path) -> None:
    config = TrainingConfig(steps=1, groups_per_step=1, group_size=2, batch_rule="differing_groups")
    async with collecting(tmp_path) as (collector, source, journal):
        batches = StepBatches(collector, config, Samples())
        batch = await batches.open(1)
        closing = asyncio.create_task(batches.close(batch, 1))
        for group in range(MAX_TRIES):
            await until(lambda group=group: len(source.started) == 2 * (group + 1))
            source.queue.put_nowait([accepted(uuid) for uuid in source.started[-2:]])
        await closing
        assert {plan.step for plan in journal.registered.values()} == {1}, "the replacements too"
        assert len(batch.groups) == MAX_TRIES


async def test_an_interrupted_step_goes_on_with_what_it_had(tmp_path: Path) -> None:
    config = TrainingConfig(steps=2, groups_per_step=1, group_size=2)
    planned = [
        EpisodeRegistered(episode_uuid=uuid, episode_type="train", group_id="g", step=2, position=5)
        for uuid in "ab"
    ]
    async with collecting(tmp_path) as (collector, source, journal):
        journal.write([*planned, accepted("a")])
        batches = StepBatches(collector, config, Samples())
        assert batches.restore(History(step=1)) == []
        outcome = accepted("a")
        assert batches.restore(History(step=1, planned=planned, outcomes={"a": outcome})) == [outcome]
        batch = await batches.open(2)
        assert (batch.label, source.started, batch.leftovers) == ("step 2", ["b"], ["b"])
        assert source.positions == [5]
        source.queue.put_nowait([accepted("b")])
        await batches.close(batch, 2)
        assert batch.outcomes.keys() == {"a", "b"}
        assert (await batches.open(2)) is not batch


async def test_without_samples_of_its_own_a_step_takes_those_of_clients(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, source, _):
        batches = StepBatches(collector, TrainingConfig(steps=1, groups_per_step=1, group_size=2), None)
        assert (
            batches.restore(
                History(planned=[EpisodeRegistered(episode_uuid="x", episode_type="train", group_id="g")])
            )
            == []
        )
        batch = await batches.open(1)
        source.queue.put_nowait([accepted(uuid, group="G", pool="w") for uuid in ("a", "b")])
        assert await batches.close(batch, 1) == 0
        assert (batch.outcomes.keys(), source.started) == ({"a", "b"}, [])
