"""Outcomes find their batch; of those that nobody waits for, the ledger is told why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from interchange_helpers import until
from rollout_helpers import make_accepted, make_call
from run_ledger import KeptRows
from tinkerscript.config import TrainingConfig
from tinkerscript.errors import LinkError, NoSuccessError
from tinkerscript.ledger.history import History, PlannedRow
from tinkerscript.ledger.rows import TrainedRow, TrainerRow, Use
from tinkerscript.testing import QuietReporter
from tinkerscript.train.collector import Batch, Collector
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.train.off_policy import PolicyLags
from tinkerscript.train.stream import MAX_TRIES, GroupStream
from tinkerscript.trainer_link.messages import BatchProgress, EpisodeAccepted, EpisodeFailed, Outcome, usable


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


def accepted(uuid: str, *, group: str = "g", pool: str = "", size: int = 0, **more: int) -> EpisodeAccepted:
    return make_accepted(uuid, float(len(uuid)), group_id=group, group_size=size, pool=pool, **more)


def plans(*uuids: str, group: str = "g") -> list[PlannedEpisode]:
    return [PlannedEpisode("train", group, {}, episode_uuid=uuid) for uuid in uuids]


@asynccontextmanager
async def collecting(*, client_samples: bool = True) -> AsyncGenerator[tuple[Collector, ScriptedSource]]:
    source = ScriptedSource()
    collector = Collector(source, QuietReporter(), group_size=2, client_samples=client_samples)
    running = asyncio.create_task(collector.run())
    async with asyncio.timeout(10):
        yield collector, source
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_the_episodes_of_a_batch_are_started_for_its_step_and_none_is_left_out() -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        assert (source.started, source.steps) == (["a", "b"], [1])
        source.queue.put_nowait([accepted("a", number=4), accepted("b", number=7)])
        assert await collector.closed(batch, lambda n: [], 1) == 0
        await collector.settled()
        await collector.received_until(7)
        waiting = asyncio.create_task(collector.received_until(8))
        source.queue.put_nowait([accepted("late", sequence=3, number=8)])
        await waiting
        assert source.left_out == [(3, 0, "no batch is waiting for it")]


async def test_what_a_batch_does_not_need_is_cancelled_and_the_ledger_is_told() -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b"), plans("c", "d", group="h")], step=1)
        source.queue.put_nowait([accepted("a"), accepted("b")])
        assert await collector.closed(batch, lambda n: [], 1) == 2
        assert source.cancelled == ["c", "d"]
        assert source.reasons == ["step 1 has enough without this episode"]
        failure = {"kind": "cancelled", "message": "enough"}
        cancelled = EpisodeFailed(episode_uuid="c", sequence=3, failures=[failure])
        source.queue.put_nowait([cancelled, accepted("d", group="h", sequence=4)])
        await collector.settled()
        assert source.left_out == [(3, 1, "cancelled: enough"), (4, 1, "no batch is waiting for it")]
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
async def test_a_result_that_cannot_train_is_named_and_is_a_failure_to_its_batch(kind: str) -> None:
    result, reason = UNUSABLE[kind]
    async with collecting() as (collector, source):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        source.queue.put_nowait([result, accepted("b")])
        await collector.closed(batch, lambda n: [], 1)
        assert [outcome.episode_uuid for outcome in batch.groups["g"].accepted] == ["b"]
        failed = batch.outcomes["a"]
        assert isinstance(failed, EpisodeFailed)
        assert failed.failures[-1]["kind"] == kind
        assert source.kept == [], "the step says what became of it"
        (note,) = collector.progress.notes  # type: ignore[attr-defined]
        assert note.startswith("episode a is kept and does not train")
        assert note.endswith(f"{reason} from client 'w'")


def test_a_reward_out_of_bounds_is_a_failure_with_every_earlier_one() -> None:
    earlier: list[dict[str, object]] = [{"kind": "lease_expired"}]
    fields: dict[str, Any] = {"episode_type": "eval", "pool": "p", "group_id": "g", "group_size": 4}
    fields |= {"sequence": 6, "number": 8, "after": 7}
    failed = usable(make_accepted("a", 1e30, attempt=2, retries=earlier, **fields))
    assert isinstance(failed, EpisodeFailed)
    assert {name: getattr(failed, name) for name in fields} == fields
    assert failed.failures[:-1] == earlier
    last = failed.failures[-1]
    assert (last["kind"], last["attempt"], last["client_uuid"]) == ("reward_out_of_bounds", 2, "w")
    assert "1e+30" in str(last["message"])
    assert not failed.is_cancelled
    for outcome in (failed, accepted("a")):
        assert usable(outcome) is outcome


async def test_groups_of_clients_that_end_in_turns_are_kept_whole() -> None:
    async with collecting() as (collector, source):
        for uuid, group in (("a", "A"), ("b", "B"), ("aa", "A"), ("bb", "B")):
            source.queue.put_nowait([accepted(uuid, group=group, pool="w")])
        for expected in ({"a", "aa"}, {"b", "bb"}):
            batch = Batch("step", rule="groups", groups=1, group_size=2, from_clients=True)
            await collector.filled(batch)
            assert batch.outcomes.keys() == expected
        assert source.kept == []


async def test_clients_groups_that_never_fill_are_given_up_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client may hold what the trainer would keep for it for ever."""
    one = accepted("a", group="A", pool="w", sequence=1)
    monkeypatch.setattr("tinkerscript.train.collector.INCOMPLETE_BYTES", 3 * len(msgspec.msgpack.encode(one)))
    async with collecting() as (collector, source):
        names = [("a", "A"), ("b", "B"), ("c", "C"), ("d", "D"), ("cc", "C")]
        for sequence, (uuid, group) in enumerate(names, start=1):
            source.queue.put_nowait([accepted(uuid, group=group, pool="w", sequence=sequence)])
        batch = Batch("step", rule="groups", groups=1, group_size=2, from_clients=True)
        await collector.filled(batch)
        assert batch.outcomes.keys() == {"c", "cc"}
        reason = "its group 'A' is incomplete, and later ones fill the trainer's memory"
        assert source.left_out == [(1, 0, reason)]


async def test_the_batch_that_is_filled_and_who_is_ahead_of_it_is_told() -> None:
    async with collecting() as (collector, source):
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


async def test_clients_own_samples_are_left_out_by_name_where_a_task_trains() -> None:
    async with collecting(client_samples=False) as (collector, source):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        theirs = [accepted(f"c{n}", group="w/g", pool="w", size=2, sequence=n) for n in (5, 6)]
        source.queue.put_nowait([*theirs, accepted("a"), accepted("b")])
        await collector.closed(batch, lambda n: [], 1)
        assert batch.outcomes.keys() == {"a", "b"}
        reason = "the run trains on the samples of its task, not on clients' own"
        assert source.left_out == [(5, 0, reason), (6, 0, reason)]


async def test_an_error_of_the_source_reaches_who_waits() -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        source.queue.put_nowait(RuntimeError("the link broke"))
        with pytest.raises(RuntimeError, match="the link broke"):
            await collector.closed(batch, lambda n: [], 1)


async def test_a_ledger_that_cannot_be_told_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(rows: Collection[TrainerRow]) -> None:
        raise LinkError("the server refused this trainer")

    async with collecting() as (collector, source):
        batch = Batch("step 1", rule="groups", groups=1, group_size=2)
        await collector.open(batch, [plans("a", "b")], step=1)
        monkeypatch.setattr(source, "note", gone)
        source.queue.put_nowait([accepted("nobody's")])
        with pytest.raises(LinkError, match="refused this trainer"):
            await collector.closed(batch, lambda n: [], 1)


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
        return PlannedEpisode("train", group_id, {"position": position}, position=position, **more)


def stream_of(collector: Collector, config: TrainingConfig, samples: Any) -> GroupStream:
    lags = PolicyLags(config, {0: 0})
    lags.published(0, step=0)
    return GroupStream(collector.source, collector, collector.progress, config, samples, lags)


async def test_a_step_starts_its_groups_and_the_extra_ones_and_cancels_what_is_left() -> None:
    config = TrainingConfig(steps=2, groups_per_step=2, extra_groups=1, group_size=2)
    async with collecting() as (collector, source):
        stream = stream_of(collector, config, Samples())
        await stream.start(1)
        assert source.started == [f"1.{group}.{number}" for group in range(3) for number in range(2)]
        assert source.steps == [1]
        source.queue.put_nowait([accepted(uuid) for uuid in source.started[:4]])
        step = await stream.take(1, version=0)
        assert (step.number, step.cancelled, step.policy_version, step.max_lag) == (1, 2, 0, 0)
        assert source.cancelled == ["1.2.0", "1.2.1"]
        assert [len(group) for _, group in step.groups] == [2, 2]
        assert source.steps == [1], "the next step's groups wait"


async def test_with_asynchronous_the_next_step_starts_before_a_step_trains() -> None:
    config = TrainingConfig(steps=2, groups_per_step=1, group_size=2, asynchronous=True, max_policy_lag=1)
    async with collecting() as (collector, source):
        stream = stream_of(collector, config, Samples())
        await stream.start(1)
        for taken in (1, 2):
            source.queue.put_nowait([accepted(uuid) for uuid in source.started[-2:]])
            await stream.take(taken, version=0)
            assert source.steps == [1, 2], "and none after the last one"


async def test_groups_without_a_difference_are_replaced_up_to_the_limit() -> None:
    config = TrainingConfig(steps=1, groups_per_step=1, group_size=2, batch_rule="differing_groups")
    async with collecting() as (collector, source):
        taking = asyncio.create_task(stream_of(collector, config, Samples()).take(1, version=0))
        for group in range(MAX_TRIES):
            await until(lambda group=group: len(source.started) == 2 * (group + 1))
            source.queue.put_nowait([accepted(uuid) for uuid in source.started[-2:]])
        assert len((await taking).batch.groups) == MAX_TRIES
        assert set(source.steps) == {1}, "the replacements too"


async def test_a_step_of_which_every_episode_fails_is_set_aside() -> None:
    config = TrainingConfig(steps=1, groups_per_step=1, group_size=2)
    async with collecting() as (collector, source):
        stream = stream_of(collector, config, Samples())
        await stream.start(1)
        failures: list[dict[str, object]] = [{"kind": "task_error", "message": "no"}]
        source.queue.put_nowait(
            [EpisodeFailed(episode_uuid=uuid, failures=failures) for uuid in source.started]
        )
        with pytest.raises(NoSuccessError, match="step 1: all 2 episodes that ended failed"):
            await stream.take(1, version=0)
        assert [(row.step, row.outcome) for row in source.of(TrainedRow)] == [(1, Use.SET_ASIDE)] * 2


def planned(uuid: str, position: int) -> PlannedRow:
    return PlannedRow(episode_uuid=uuid, group_id="g", position=position)


@pytest.mark.parametrize(("groups", "missing"), [(1, 0), (2, 1)])
async def test_an_interrupted_step_goes_on_with_what_it_had_and_registers_the_rest(
    groups: int, missing: int
) -> None:
    """What has ended comes again, as what has not."""
    config = TrainingConfig(steps=2, groups_per_step=groups, group_size=2, max_policy_lag=2)
    async with collecting() as (collector, source):
        stream = stream_of(collector, config, Samples())
        stream.restore(History(step=1))
        known = [planned("a", 5), planned("b", 5)]
        stream.restore(History(step=1, planned=known, planned_groups=1))
        source.queue.put_nowait([accepted("a", number=1)])
        await collector.received_until(1)
        await stream.start(2)
        new = [f"2.0.{number}" for number in range(2)] * missing
        assert source.started == new
        source.queue.put_nowait([accepted(uuid) for uuid in ("b", *new)])
        batch = (await stream.take(2, version=0)).batch
        assert (batch.label, batch.outcomes.keys()) == ("step 2", {"a", "b", *new})
        assert {uuid: payload for uuid, payload in batch.payloads.items() if payload} == {
            uuid: {"position": 5} for uuid in "ab"
        }
        assert source.kept == []


async def test_without_samples_of_its_own_a_step_takes_those_of_clients() -> None:
    config = TrainingConfig(steps=1, groups_per_step=1, group_size=2)
    async with collecting() as (collector, source):
        stream = stream_of(collector, config, None)
        stream.restore(History(planned=[planned("x", 0)], planned_groups=1))
        source.queue.put_nowait([accepted(uuid, group="G", pool="w") for uuid in ("a", "b")])
        step = await stream.take(1, version=0)
        assert (step.batch.outcomes.keys(), step.cancelled, source.started) == ({"a", "b"}, 0, [])
