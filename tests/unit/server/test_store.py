"""The stores that need no other process: each keeps the contract, and what was committed over a restart."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from interchange_helpers import stored_outcomes
from store_contract import Reopen, StoreContract, episode
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store import open_store
from tinkerscript.server.store.episode_store import (
    GATHERED_BYTES,
    GATHERED_TURNS,
    GATHERED_WRITES,
    EpisodeStore,
    WriteBatch,
)
from tinkerscript.server.store.sqlite import LONG_BATCH, SqliteStore
from tinkerscript.testing import MemoryStore

Durability = Literal["normal", "full"]


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


class TestContract(StoreContract):
    """With each of them."""


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


class Batches(MemoryStore):
    """Notes how many writes each transaction has."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = list[int]()

    async def write(self, batch: WriteBatch) -> None:
        self.counts.append(batch.count)
        await super().write(batch)


async def test_writes_of_successive_turns_share_transactions() -> None:
    """Until a turn brings none, or there are enough."""
    store = Batches()

    async def write_for(turns: int, at_once: int = 1, transcript: bytes = b"") -> list[int]:
        for number in range(turns):
            for each in range(at_once):
                store.add_transcript(episode(f"e{number}", number), each, transcript)
            await asyncio.sleep(0)
        await store.durable()
        counts, store.counts = store.counts, []
        return counts

    assert await write_for(1) == [1]
    assert await write_for(3) == [3]
    many = await write_for(5 * GATHERED_TURNS)
    assert sum(many) == 5 * GATHERED_TURNS
    assert GATHERED_TURNS <= many[0] <= GATHERED_TURNS + 1
    assert (await write_for(4, at_once=GATHERED_WRITES))[0] == GATHERED_WRITES
    assert await write_for(3, transcript=bytes(GATHERED_BYTES)) == [1, 1, 1]


async def test_what_waits_alone_is_committed_at_once() -> None:
    store = Batches()
    store.add(episode("e", 1))
    durable = asyncio.create_task(store.durable())
    turns = 0
    while not durable.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns <= 4


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


async def test_a_thread_moves_the_log_into_the_file_whenever_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.sqlite"
    monkeypatch.setattr("tinkerscript.server.store.sqlite.LOG_BYTES", 2**17)
    store = SqliteStore(path)
    moved_by, read_all = list[str](), store._read_all

    def reading(*of_query: Any) -> list[Any]:
        moved_by.append(threading.current_thread().name)
        return read_all(*of_query)

    monkeypatch.setattr(store, "_read_all", reading)
    for number in range(100):
        store.add(episode(f"e{number}", number))
        await store.durable()
        assert (tmp_path / "server.sqlite-wal").stat().st_size < 2**17 + 2**15
    assert threading.current_thread().name not in moved_by
    without_log = shutil.copy(path, tmp_path / "copy.sqlite")
    assert 2 <= len(moved_by) < len(stored_outcomes(without_log)) < 100
    await store.close()


async def test_a_thread_writes_a_long_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(tmp_path / "server.sqlite")
    written_by, write = list[str](), store._write

    def writing(statements: Any) -> None:
        written_by.append(threading.current_thread().name)
        write(statements)

    monkeypatch.setattr(store, "_write", writing)
    for number in range(LONG_BATCH + 1):
        store.add(episode(f"e{number}", number))
    await store.durable()
    store.add(episode("short", LONG_BATCH + 1))
    await store.durable()
    long, short = written_by
    assert long != short == threading.current_thread().name
    assert len(await store.load()) == LONG_BATCH + 2
    await store.close()


async def test_a_log_that_cannot_be_moved_fails_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.sqlite"
    monkeypatch.setattr("tinkerscript.server.store.sqlite.LOG_BYTES", 0)
    store = SqliteStore(path)
    path.rename(tmp_path / "elsewhere.sqlite")
    path.mkdir()
    store.add(episode())
    with pytest.raises(StoreError, match=r"episode file .*server\.sqlite: unable to open"):
        await store.durable()
    await store.close()


async def test_a_closed_store_leaves_no_thread(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "server.sqlite", durability="full")
    store.add(episode())
    await store.durable()
    (writer,) = [thread for thread in threading.enumerate() if thread.name.startswith("episode-store-writer")]
    await store.close()
    assert not writer.is_alive()
