"""Outcomes find their batch; of those that nobody waits for, the ledger is told why."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
from msgspec import structs

from interchange_helpers import until
from rollout_helpers import make_accepted, make_call
from scripted_source import collecting
from tinkerscript.train.collector import Batch
from tinkerscript.train.episode_source import PlannedEpisode
from tinkerscript.trainer_link.messages import BatchProgress, EpisodeAccepted, EpisodeFailed, usable


def accepted(uuid: str, *, group: str = "g", pool: str = "", size: int = 0, **more: int) -> EpisodeAccepted:
    return make_accepted(uuid, float(len(uuid)), group_id=group, group_size=size, pool=pool, **more)


def plans(*uuids: str, group: str = "g") -> list[PlannedEpisode]:
    return [PlannedEpisode("train", group, {}, episode_uuid=uuid) for uuid in uuids]


async def test_the_episodes_of_a_batch_are_started_for_its_step_and_none_is_left_out() -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1")
        await collector.open(batch, [plans("a", "b")], step=1)
        assert (source.started, source.steps) == (["a", "b"], [1])
        source.queue.put_nowait([accepted("a", number=4), accepted("b", number=7)])
        await collector.until(lambda: batch.is_over, batch)
        await collector.settled()
        await collector.received_until(7)
        waiting = asyncio.create_task(collector.received_until(8))
        source.queue.put_nowait([accepted("late", sequence=3, number=8)])
        await waiting
        assert source.left_out == [(3, 0, "no batch is waiting for it")]


async def test_checking_for_a_teacher_delays_no_model_call() -> None:
    """A program's long context takes seconds to render, and the link must not fall silent."""
    async with collecting() as (collector, source):
        checked = list[str]()
        collector.check_for_teacher = lambda _: checked.append(threading.current_thread().name)
        batch = Batch("step 1")
        await collector.open(batch, [plans("a")], step=1)
        source.queue.put_nowait([accepted("a")])
        await collector.until(lambda: batch.is_over, batch)
        assert checked
        assert threading.current_thread().name not in checked


async def test_what_is_given_up_is_cancelled_and_the_ledger_is_told() -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1")
        await collector.open(batch, [plans("a", "b"), plans("c", "d", group="h")], step=1)
        source.queue.put_nowait([accepted("a"), accepted("b")])
        await collector.until(lambda: bool(batch.counted), batch)
        collector.give_up(batch.leftovers, "step 1 has enough without this episode")
        assert source.cancelled == ["c", "d"]
        assert source.reasons == ["step 1 has enough without this episode"]
        failure = {"kind": "cancelled", "message": "enough"}
        cancelled = EpisodeFailed(episode_uuid="c", sequence=3, failures=[failure])
        source.queue.put_nowait([cancelled, accepted("d", group="h", sequence=4)])
        await collector.settled()
        assert source.left_out == [(3, 1, "cancelled: enough"), (4, 1, "no batch is waiting for it")]
        assert batch.outcomes.keys() == {"a", "b"}


ORPHAN = make_call(make_call(None, [1, 2], [3]), [4], [5])
"""It goes on from a call which is not there."""


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        ({"reward": 1.7e308}, "reward_out_of_bounds", "got 1.7e+308"),
        ({"all_calls": [ORPHAN]}, "calls_unreadable", "is not among the calls before it"),
    ],
)
async def test_a_result_that_cannot_train_is_named_and_is_a_failure_to_its_batch(
    change: dict[str, Any], kind: str, reason: str
) -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1")
        await collector.open(batch, [plans("a", "b")], step=1)
        source.queue.put_nowait([structs.replace(accepted("a"), **change), accepted("b")])
        await collector.until(lambda: batch.is_over, batch)
        assert [outcome.episode_uuid for outcome in batch.groups["g"].accepted] == ["b"]
        failed = batch.outcomes["a"]
        assert isinstance(failed, EpisodeFailed)
        assert failed.failures[-1]["kind"] == kind
        assert source.kept == [], "the step says what became of it"
        (note,) = collector.progress.notes  # type: ignore[attr-defined]
        assert note.startswith("episode a is kept but does not train")
        assert note.endswith(f"{reason} from client 'w'")


def test_a_result_without_a_score_that_is_compared_is_a_failure() -> None:
    scored = structs.replace(accepted("a"), log_metrics={"score/short": 1.0})
    failed = usable(scored, ["right"])
    assert isinstance(failed, EpisodeFailed)
    assert "needs the score 'right', and the scores of this episode are short" in str(failed.failures)
    assert usable(scored, ["short"]) is scored
    evaluated = structs.replace(scored, episode_type="eval")
    assert usable(evaluated, ["right"]) is evaluated, "an evaluation compares rewards"


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
    assert usable(failed) is failed


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
        batch = Batch("step", needed=1)
        await collector.filled(batch)
        assert batch.outcomes.keys() == {"c", "cc"}
        reason = "its group 'A' is incomplete, and later ones fill the trainer's memory"
        assert source.left_out == [(1, 0, reason)]


async def test_the_batch_that_is_filled_and_who_is_ahead_of_it_is_told() -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1", needed=1)
        filling = asyncio.create_task(collector.filled(batch))
        await until(lambda: bool(source.batches))
        for group in ("A", "B", "C"):
            both = [accepted(f"{group}{number}", group=group, pool="w") for number in range(2)]
            source.queue.put_nowait(list(both))
        await filling
        await until(lambda: source.queue.empty() and told(source.batches[-1]) == (1, 1, {"w": 2}))
        assert told(source.batches[0]) == (0, 1, {})
        assert set(source.at_once) == {True}, "who is ahead waits for it"
        planned = Batch("step 2")
        await collector.open(planned, [plans("p", "q")], step=2)
        source.queue.put_nowait([accepted("p"), accepted("q")])
        await collector.until(lambda: planned.is_over, planned)
        assert source.batches[-1] is None
        assert source.at_once[-1] is False, "then with each heartbeat"


def told(batch: BatchProgress | None) -> tuple[int, int, dict[str, int]]:
    assert batch is not None
    return batch.have, batch.needed, batch.groups_ahead


async def test_clients_own_samples_are_left_out_by_name_where_a_task_trains() -> None:
    async with collecting(client_samples=False) as (collector, source):
        batch = Batch("step 1")
        await collector.open(batch, [plans("a", "b")], step=1)
        theirs = [accepted(f"c{n}", group="w/g", pool="w", size=2, sequence=n) for n in (5, 6)]
        source.queue.put_nowait([*theirs, accepted("a"), accepted("b")])
        await collector.until(lambda: batch.is_over, batch)
        assert batch.outcomes.keys() == {"a", "b"}
        reason = "the run trains on the samples of its task, not on clients' own"
        assert source.left_out == [(5, 0, reason), (6, 0, reason)]


async def test_an_error_of_the_source_reaches_who_waits() -> None:
    async with collecting() as (collector, source):
        batch = Batch("step 1")
        await collector.open(batch, [plans("a", "b")], step=1)
        source.queue.put_nowait(RuntimeError("the link broke"))
        with pytest.raises(RuntimeError, match="the link broke"):
            await collector.until(lambda: batch.is_over, batch)
