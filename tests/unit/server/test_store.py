"""Both stores: they behave alike, keep what was committed over a restart, and nothing else."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from tinkerscript.errors import StoreError
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.base import EpisodeStore, MemoryStore, WriteBatch
from tinkerscript.server.store.sqlite import SqliteStore, read_outcomes

Durability = Literal["normal", "full"]
Reopen = Callable[[], EpisodeStore]


@pytest.fixture(params=["memory", "memory-thread", "normal", "full"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Gives a store; the next call gives what a process finds that starts after the first was killed."""
    memory = MemoryStore(in_thread=request.param == "memory-thread")
    opened: list[SqliteStore] = []

    def open_store() -> EpisodeStore:
        if request.param.startswith("memory"):
            return memory
        opened.append(SqliteStore(tmp_path / "server.sqlite", durability=request.param))
        return opened[-1]

    yield open_store
    for store in [*opened, memory]:
        store.close()


def episode(uuid: str = "e", sequence: int = 1) -> EpisodeRecord:
    return EpisodeRecord(
        uuid=uuid,
        sequence=sequence,
        episode_type="eval",
        group_id="g",
        digest=b"digest",
        payload=b'{"input": 1}',
        pool="p",
        group_size=4,
    )


def call(name: str, parent: str | None = None) -> Call:
    return Call(
        call_id=name,
        parent_id=parent,
        new_prompt=pack_ids([1, 2]),
        sampled=pack_ids([3]),
        logprobs=pack_logprobs([-0.5]),
        stop_reason="stop",
        policy_version=4,
    )


def fields(each: EpisodeRecord) -> dict[str, object]:
    not_stored = {"renewed_at", "ends_at", "calls_in_flight"}
    return {name: getattr(each, name) for name in EpisodeRecord.__slots__ if name not in not_stored}


async def test_what_is_committed_survives(reopen: Reopen) -> None:
    store, first, second = reopen(), episode(), episode("f", 2)
    store.add(second)
    store.add(first)
    first.state, first.claimants, first.lease_s, first.policy_version = "claimed", ["c", "d"], 12.5, 7
    first.request_ids, first.forgiven, first.claimed_at = ["", "request"], 1, 1e9
    first.offered = first.dropped = True
    first.failures.append(Failure(kind="aborted", message="ü", attempt=1, client_uuid="c"))
    store.save(first)
    await store.durable()
    loaded = reopen().load()
    assert [fields(each) for each in loaded] == [fields(first), fields(second)]
    assert loaded[0].failures == first.failures


async def test_what_is_not_committed_is_not_visible(reopen: Reopen) -> None:
    store, each = reopen(), episode()
    store.add(each)
    store.add_call(each, 1, call("a"))
    assert reopen().load() == []
    assert store.calls(each, 1) == []
    store.commit()
    assert len(reopen().load()) == 1
    assert [each.call_id for each in store.calls(each, 1)] == ["a"]


async def test_a_stored_episode_is_a_copy(reopen: Reopen) -> None:
    store, each = reopen(), episode()
    store.add(each)
    await store.durable()
    each.state = "failed"
    assert reopen().load()[0].state == "registered"


async def test_calls_keep_their_order_and_their_claim(reopen: Reopen) -> None:
    store, each, other = reopen(), episode(), episode("f", 2)
    for number in range(3):
        store.add_call(each, 1, call(f"one-{number}"))
    store.add_call(each, 2, call("two", parent="x"))
    store.add_call(other, 1, call("other"))
    await store.durable()
    again = reopen()
    assert [found.call_id for found in again.calls(each, 1)] == ["one-0", "one-1", "one-2"]
    assert again.calls(each, 2) == [call("two", parent="x")]
    again.drop_calls(each, 1)
    again.commit()
    assert again.calls(each, 1) == []
    assert len(again.calls(other, 1)) == 1


async def test_a_result_lives_until_it_is_acknowledged(reopen: Reopen) -> None:
    store, each = reopen(), episode()
    each.claimants = ["c"]
    store.add(each)
    store.add_call(each, 1, call("a"))
    each.state, each.reward, each.result, each.result_digest = "ended", 0.25, b"{}", b"d"
    store.save(each)
    await store.durable()
    found = reopen().load()[0]
    assert (found.reward, found.result, found.payload) == (0.25, b"{}", each.payload)
    each.state, each.acknowledged, each.payload, each.result = "accepted", True, b"", b""
    store.save(each)
    await store.durable()
    found = reopen().load()[0]
    assert (found.state, found.result, found.payload, found.result_digest) == ("accepted", b"", b"", b"d")
    assert store.calls(each, 1) == []


@pytest.mark.parametrize("durability", ["normal", "full"])
async def test_one_tick_shares_one_transaction(tmp_path: Path, durability: Durability) -> None:
    store = SqliteStore(tmp_path / "server.sqlite", durability=durability)
    order: list[str] = []

    async def write(number: int) -> None:
        store.add(episode(f"e{number}", number))
        store.after_commit(lambda: order.append(f"callback {number}"))
        await store.durable()
        assert len(read_outcomes(tmp_path / "server.sqlite")) == 20
        order.append(f"waiter {number}")

    await asyncio.gather(*(write(number) for number in range(20)))
    assert sorted(order) == sorted(f"{kind} {n}" for kind in ("callback", "waiter") for n in range(20))
    store.close()


class HeldStore(MemoryStore):
    """Writes in its thread when it is let go."""

    def __init__(self) -> None:
        super().__init__(in_thread=True)
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.transactions = 0

    def _prepare(self, batch: WriteBatch) -> Callable[[], None]:
        write = super()._prepare(batch)
        self.transactions += 1

        def held() -> None:
            self.begun.release()
            assert self.go.acquire(timeout=20)
            write()

        return held


async def test_a_thread_writes_while_the_next_batch_gathers() -> None:
    store, first = HeldStore(), episode()

    async def write(each: EpisodeRecord) -> None:
        store.add(each)
        store.after_commit(lambda: order.append(each.uuid))
        await store.durable()

    order: list[str] = []
    waiting = [asyncio.create_task(write(first))]
    assert await asyncio.to_thread(store.begun.acquire, timeout=20)
    first.state = "claimed"
    for number in range(2, 12):
        waiting.append(asyncio.create_task(write(episode(f"e{number}", number))))
        await asyncio.sleep(0)
    assert store.transactions == 1, "the others gather"
    assert not any(task.done() for task in waiting)
    store.go.release()
    await waiting[0]
    assert [each.state for each in store.load()] == ["registered"], "as it stood when the write began"
    assert order == ["e"]
    store.go.release()
    await asyncio.gather(*waiting)
    assert order == ["e", *(f"e{number}" for number in range(2, 12))]
    assert (store.transactions, len(store.load())) == (2, 11)
    await store.durable()
    store.close()


async def test_closing_waits_for_what_the_thread_writes() -> None:
    store = HeldStore()
    store.add(episode())
    told = asyncio.create_task(store.durable())
    assert await asyncio.to_thread(store.begun.acquire, timeout=20)
    store.add(episode("f", 2))
    store.go.release()
    store.go.release()
    store.close()
    assert len(store.load()) == 2
    await told


async def test_after_commit_never_runs_before_it_returns(reopen: Reopen) -> None:
    store = reopen()
    ran = asyncio.Event()
    store.after_commit(ran.set)
    assert not ran.is_set()
    await store.durable()
    assert ran.is_set()
    await store.durable()


async def test_a_waiter_that_is_cancelled_harms_nobody(reopen: Reopen) -> None:
    store = reopen()
    store.add(episode())
    impatient = asyncio.ensure_future(store.durable())
    patient = asyncio.ensure_future(store.durable())
    await asyncio.sleep(0)
    impatient.cancel()
    await patient
    assert len(reopen().load()) == 1


@pytest.mark.parametrize("durability", ["normal", "full"])
async def test_a_failed_commit_fails_everything_after_it(tmp_path: Path, durability: Durability) -> None:
    store = SqliteStore(tmp_path / "server.sqlite", durability=durability)
    store.add(episode())
    await store.durable()
    watching = asyncio.ensure_future(store.failed())
    store.add(episode("other uuid, same sequence", 1))
    store.add(episode("fine", 2))
    with pytest.raises(StoreError, match=r"server\.sqlite: UNIQUE"):
        await store.durable()
    with pytest.raises(StoreError):
        store.add(episode("later", 3))
    with pytest.raises(StoreError):
        await watching
    assert read_outcomes(tmp_path / "server.sqlite") == {"e": "registered"}, "all of a transaction or nothing"
    store.close()


async def test_outcomes_are_read_while_served_and_after(tmp_path: Path) -> None:
    path = tmp_path / "server.sqlite"
    store, first, second = SqliteStore(path), episode(), episode("f", 2)
    store.add(first)
    store.add(second)
    first.state = "accepted"
    await store.durable()
    assert read_outcomes(path) == {"e": "accepted", "f": "registered"}
    store.close()
    before = path.read_bytes()
    assert read_outcomes(path) == {"e": "accepted", "f": "registered"}
    assert path.read_bytes() == before
    with pytest.raises(StoreError, match=r"none\.sqlite"):
        read_outcomes(tmp_path / "none.sqlite")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="schema version 99"):
        SqliteStore(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="not a database"):
        SqliteStore(path)
