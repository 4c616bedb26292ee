"""Both stores: they behave alike, keep what was committed over a restart, and nothing else."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from interchange_helpers import stored_outcomes
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store import open_store
from tinkerscript.server.store.episode_store import EpisodeStore, WriteBatch
from tinkerscript.server.store.sqlite import SqliteStore
from tinkerscript.testing import MemoryStore
from tinkerscript.trainer_link.messages import RecordedOutcome

Durability = Literal["normal", "full"]
Reopen = Callable[[], EpisodeStore]


@pytest.fixture(params=["memory", "normal", "full"])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reopen]:
    """Gives a store; the next call gives what a process finds that starts after the first was killed."""
    memory = MemoryStore()
    opened: list[SqliteStore] = []

    def open_store() -> EpisodeStore:
        if request.param == "memory":
            return memory
        opened.append(SqliteStore(tmp_path / "server.sqlite", durability=request.param))
        return opened[-1]

    yield open_store
    for store in [*opened, memory]:
        await store.close()


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


async def calls_of(store: EpisodeStore, each: EpisodeRecord, attempt: int) -> list[Call]:
    (calls,) = await store.calls([(each, attempt)])
    return calls


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
    loaded = await reopen().load()
    assert [fields(each) for each in loaded] == [fields(first), fields(second)]
    assert loaded[0].failures == first.failures


async def test_what_is_not_committed_is_not_visible(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    store, each = reopen(), episode()
    write = store.write
    before: list[object] = []

    async def look_and_write(batch: WriteBatch) -> None:
        before.extend([await reopen().load(), await calls_of(store, each, 1)])
        await write(batch)

    monkeypatch.setattr(store, "write", look_and_write)
    store.add(each)
    store.add_call(each, 1, call("a"))
    await store.durable()
    assert before == [[], []]
    assert len(await reopen().load()) == 1
    assert [each.call_id for each in await calls_of(store, each, 1)] == ["a"]


async def test_a_stored_episode_is_a_copy(reopen: Reopen) -> None:
    store, each = reopen(), episode()
    store.add(each)
    await store.durable()
    each.state = "failed"
    assert (await reopen().load())[0].state == "registered"


async def test_calls_keep_their_order_and_their_claim(reopen: Reopen) -> None:
    store, each, other = reopen(), episode(), episode("f", 2)
    for number in range(3):
        store.add_call(each, 1, call(f"one-{number}"))
    store.add_call(each, 2, call("two", parent="x"))
    store.add_call(other, 1, call("other"))
    await store.durable()
    again = reopen()
    assert [found.call_id for found in await calls_of(again, each, 1)] == ["one-0", "one-1", "one-2"]
    assert await calls_of(again, each, 2) == [call("two", parent="x")]
    both = await again.calls([(other, 1), (each, 2), (each, 3)])
    assert [[found.call_id for found in calls] for calls in both] == [["other"], ["two"], []]
    again.drop_calls(each, 1)
    await again.durable()
    assert await calls_of(again, each, 1) == []
    assert len(await calls_of(again, other, 1)) == 1


async def test_a_result_lives_until_it_is_acknowledged(reopen: Reopen) -> None:
    store, each = reopen(), episode()
    each.claimants = ["c"]
    store.add(each)
    store.add_call(each, 1, call("a"))
    each.state, each.reward, each.result, each.result_digest = "ended", 0.25, b"{}", b"d"
    store.save(each)
    await store.durable()
    found = (await reopen().load())[0]
    assert (found.reward, found.result, found.payload) == (0.25, b"{}", each.payload)
    each.state, each.acknowledged, each.payload, each.result = "accepted", True, b"", b""
    store.save(each)
    await store.durable()
    found = (await reopen().load())[0]
    assert (found.state, found.result, found.payload, found.result_digest) == ("accepted", b"", b"", b"d")
    assert await calls_of(store, each, 1) == []


@pytest.mark.parametrize("durability", ["normal", "full"])
async def test_one_tick_shares_one_transaction(tmp_path: Path, durability: Durability) -> None:
    store = SqliteStore(tmp_path / "server.sqlite", durability=durability)
    order: list[str] = []

    async def write(number: int) -> None:
        store.add(episode(f"e{number}", number))
        store.after_commit(lambda: order.append(f"callback {number}"))
        await store.durable()
        assert len(stored_outcomes(tmp_path / "server.sqlite")) == 20
        order.append(f"waiter {number}")

    await asyncio.gather(*(write(number) for number in range(20)))
    assert sorted(order) == sorted(f"{kind} {n}" for kind in ("callback", "waiter") for n in range(20))
    await store.close()


@dataclass
class HeldThread:
    """A store whose writing thread waits to be let go before each transaction."""

    store: SqliteStore
    begun: threading.Semaphore
    go: threading.Semaphore
    transactions: int = 0


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldThread:
    store = SqliteStore(tmp_path / "server.sqlite", durability="full")
    made = HeldThread(store, threading.Semaphore(0), threading.Semaphore(0))
    write = store._write

    def wait_and_write(statements: list[tuple[str, list[tuple[Any, ...]]]]) -> None:
        made.transactions += 1
        made.begun.release()
        assert made.go.acquire(timeout=20)
        write(statements)

    monkeypatch.setattr(store, "_write", wait_and_write)
    return made


async def test_a_thread_writes_while_the_next_batch_gathers(held: HeldThread) -> None:
    store, first = held.store, episode()

    async def write(each: EpisodeRecord) -> None:
        store.add(each)
        store.after_commit(lambda: order.append(each.uuid))
        await store.durable()

    order: list[str] = []
    waiting = [asyncio.create_task(write(first))]
    assert await asyncio.to_thread(held.begun.acquire, timeout=20)
    first.state = "claimed"
    for number in range(2, 12):
        waiting.append(asyncio.create_task(write(episode(f"e{number}", number))))
        await asyncio.sleep(0)
    assert held.transactions == 1, "the others gather"
    assert not any(task.done() for task in waiting)
    held.go.release()
    await waiting[0]
    assert [each.state for each in await store.load()] == ["registered"], "as it stood when the write began"
    assert order == ["e"]
    held.go.release()
    await asyncio.gather(*waiting)
    assert order == ["e", *(f"e{number}" for number in range(2, 12))]
    assert (held.transactions, len(await store.load())) == (2, 11)
    await store.durable()
    await store.close()


async def test_closing_waits_for_what_the_thread_writes(held: HeldThread, tmp_path: Path) -> None:
    store = held.store
    store.add(episode())
    told = asyncio.create_task(store.durable())
    assert await asyncio.to_thread(held.begun.acquire, timeout=20)
    store.add(episode("f", 2))
    held.go.release()
    held.go.release()
    await store.close()
    assert len(stored_outcomes(tmp_path / "server.sqlite")) == 2
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
    assert len(await reopen().load()) == 1


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
    assert stored_outcomes(tmp_path / "server.sqlite") == {"e": "registered"}, (
        "all of a transaction or nothing"
    )
    await store.close()


async def test_outcomes_are_read_while_served_and_after(reopen: Reopen) -> None:
    store, first, second = reopen(), episode(), episode("f", 2)
    store.add(first)
    store.add(second)
    first.state, first.acknowledged = "accepted", True
    await store.durable()
    expected = {"e": RecordedOutcome("accepted", True), "f": RecordedOutcome("registered", False)}
    assert await store.outcomes(["e", "f", "unknown"]) == expected
    assert await reopen().outcomes(["f"]) == {"f": expected["f"]}
    assert await store.outcomes([]) == {}


def test_a_write_batch_knows_whether_it_is_empty() -> None:
    batch = WriteBatch()
    assert batch.is_empty
    batch.callbacks.append(lambda: None)
    assert not batch.is_empty
    assert not batch.has_writes


class FullDisk(MemoryStore):
    """A store of somebody else's, whose errors are its own."""

    opened_with: tuple[object, ...] = ()

    async def write(self, batch: WriteBatch) -> None:
        raise OSError("no space left on device")


async def test_any_error_of_a_store_is_a_store_error() -> None:
    store = FullDisk()
    store.add(episode())
    with pytest.raises(StoreError, match="no space left"):
        await store.durable()
    with pytest.raises(StoreError, match="no space left"):
        await store.failed()
    await store.close()


def open_full_disk(url: str, folder: Path, durability: Durability) -> EpisodeStore:
    store = FullDisk()
    store.opened_with = (url, folder, durability)
    return store


def open_nothing(url: str, folder: Path, durability: Durability) -> object:
    return None


async def test_a_store_is_opened_by_its_url(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    opened: Sequence[EpisodeStore] = [
        open_store("sqlite", tmp_path, "normal"),
        open_store(f"sqlite://{other}", tmp_path, "full"),
        open_store(f"{__name__}:open_full_disk", tmp_path, "normal"),
    ]
    assert [type(store) for store in opened] == [SqliteStore, SqliteStore, FullDisk]
    assert opened[2].opened_with == (f"{__name__}:open_full_disk", tmp_path, "normal")
    assert (tmp_path / "server.sqlite").exists()
    assert other.exists()
    for store in opened:
        await store.close()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("mysql://host/db", "there is no store 'mysql://host/db'; use one of sqlite"),
        ("mysql", "there is no store 'mysql'"),
        ("no_such_module:store", "no_such_module"),
        ("tinkerscript.errors:__doc__", "not callable"),
        (f"{__name__}:open_nothing", "not an EpisodeStore"),
    ],
)
def test_a_store_that_cannot_be_opened_is_refused_by_name(tmp_path: Path, url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"interchange_server\.store: .*{text}"):
        open_store(url, tmp_path, "normal")


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


@pytest.mark.parametrize(("durability", "synchronous"), [("normal", 1), ("full", 2)])
async def test_full_durability_syncs_the_file_at_each_commit(
    tmp_path: Path, durability: Durability, synchronous: int
) -> None:
    """SQLite's numbers: 1 is NORMAL, 2 is FULL. The pragma belongs to the connection that writes."""
    store = SqliteStore(tmp_path / "server.sqlite", durability=durability)
    assert store._connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    await store.close()


async def test_a_closed_store_leaves_no_thread(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "server.sqlite", durability="full")
    store.add(episode())
    await store.durable()
    (writer,) = [thread for thread in threading.enumerate() if thread.name.startswith("episode-store-writer")]
    await store.close()
    assert not writer.is_alive()
