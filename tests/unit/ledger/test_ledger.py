"""The stores that need no other process: each keeps the contract, and what was committed over a restart."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import pytest

from interchange_helpers import stored_outcomes
from store_contract import Reopen, StoreContract, episode
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.server.store import open_store
from tinkerscript.server.store.episode_store import (
    EpisodeStore,
    WriteBatch,
)
from tinkerscript.server.store.sqlite import SqliteStore
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


async def test_the_log_is_moved_into_the_file_whenever_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.sqlite"
    monkeypatch.setattr("tinkerscript.server.store.sqlite.LOG_BYTES", 2**17)
    store = SqliteStore(path)
    for number in range(100):
        store.add(episode(f"e{number}", number))
        await store.durable()
        assert (tmp_path / "server.sqlite-wal").stat().st_size < 2**17 + 2**15
    without_log = shutil.copy(path, tmp_path / "copy.sqlite")
    assert len(stored_outcomes(without_log)) > 20
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
