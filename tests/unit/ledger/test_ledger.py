"""The ledger in SQLite: it keeps the contract of all ledgers, and says what is wrong with a file."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest

from interchange_helpers import stored_outcomes
from ledger_contract import LedgerContract, Reopen, episode, made
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.files import LEDGER_FILE, RUN_ID, is_foreign
from tinkerscript.ledger import Ledger, SqliteLedger, open_ledger
from tinkerscript.ledger.ledger import WriteBatch
from tinkerscript.ledger.rows import LEDGER_VERSION, SampleRow

Durability = Literal["normal", "full"]


@pytest.fixture(params=["normal", "full"])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reopen]:
    opened: list[SqliteLedger] = []

    def open_one() -> Ledger:
        opened.append(SqliteLedger(tmp_path / LEDGER_FILE, durability=request.param))
        return opened[-1]

    yield open_one
    for ledger in opened:
        await ledger.close()


class TestContract(LedgerContract):
    """In a file, whose commits are synced or not."""


class FullDisk(SqliteLedger):
    """A ledger whose error is not one of its database."""

    async def write(self, batch: WriteBatch) -> None:
        raise OSError("no space left on device")


async def test_any_error_of_a_write_is_a_store_error(tmp_path: Path) -> None:
    ledger = FullDisk(tmp_path / LEDGER_FILE)
    with pytest.raises(StoreError, match="no space left"):
        await ledger.commit([episode()])
    with pytest.raises(StoreError, match="no space left"):
        await ledger.failed()
    await ledger.close()


async def test_an_error_that_nobody_waited_for_is_raised_at_the_end(tmp_path: Path) -> None:
    ledger = FullDisk(tmp_path / LEDGER_FILE)
    ledger.put(episode())
    with pytest.raises(StoreError, match="no space left"):
        await ledger.close()


async def test_a_ledger_is_opened_by_its_url(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    for url, path in {"sqlite": tmp_path / LEDGER_FILE, f"sqlite://{other}": other}.items():
        assert not path.exists()
        ledger = open_ledger(url, tmp_path)
        assert path.exists()
        await ledger.close()


@pytest.mark.parametrize("url", ["mysql://host/db", "mysql", "module:name"])
def test_a_url_of_no_ledger_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"interchange_server\.store: there is no store '{url}'; use sqlite"
    ):
        open_ledger(url, tmp_path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=f"has version 99, this tinkerscript reads {LEDGER_VERSION}"):
        SqliteLedger(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=rf"{LEDGER_FILE}: file is not a database"):
        SqliteLedger(path)


async def test_a_file_that_was_cut_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    ledger = SqliteLedger(path)
    await ledger.commit(episode(number, digest=bytes(1000)) for number in range(1, 500))
    await ledger.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)

    async def read() -> None:
        await SqliteLedger(path).read("SELECT sum(length(digest)) FROM {s}episodes")

    with pytest.raises(StoreError, match=rf"{LEDGER_FILE}: database disk image is malformed"):
        await read()


async def test_a_new_ledger_has_the_mark_of_its_run(tmp_path: Path) -> None:
    (tmp_path / RUN_ID).write_text("0123456789abcdef" * 2)
    await SqliteLedger(tmp_path / LEDGER_FILE).close()
    assert not is_foreign(tmp_path / LEDGER_FILE, "0123456789abcdef" * 2)
    assert is_foreign(tmp_path / LEDGER_FILE, "fedcba9876543210" * 2)


@pytest.mark.parametrize(("durability", "synchronous"), [("normal", 1), ("full", 2)])
async def test_full_durability_syncs_the_file_at_each_commit(
    tmp_path: Path, durability: Durability, synchronous: int
) -> None:
    """SQLite's numbers: 1 is NORMAL, 2 is FULL. The pragma belongs to the connection that writes."""
    ledger = SqliteLedger(tmp_path / LEDGER_FILE, durability=durability)
    written = ledger._connection.execute("PRAGMA synchronous")  # pyright: ignore[reportPrivateUsage]
    assert written.fetchone() == (synchronous,)
    await ledger.close()


@pytest.mark.parametrize(("number", "size", "is_long"), [(5, 1, False), (1200, 1, True), (5, 2**20, True)])
async def test_a_long_transaction_does_not_stop_the_event_loop(
    tmp_path: Path, number: int, size: int, is_long: bool
) -> None:
    threads = list[int]()

    class Watched(SqliteLedger):
        def _write(self, batch: WriteBatch) -> None:
            threads.append(threading.get_ident())
            super()._write(batch)

    ledger = Watched(tmp_path / LEDGER_FILE)
    await ledger.commit(made(SampleRow, each, payload=bytes(size)) for each in range(number))
    await ledger.close()
    assert [thread != threading.get_ident() for thread in threads] == [is_long]


async def test_the_log_is_moved_into_the_file_whenever_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / LEDGER_FILE
    monkeypatch.setattr("tinkerscript.ledger.sqlite.LOG_BYTES", 2**18)
    ledger = SqliteLedger(path)
    for number in range(100):
        await ledger.commit([episode(number)])
        assert Path(f"{path}-wal").stat().st_size < 2**18 + 2**16, "one more commit"
    without_log = tmp_path / "copy.sqlite"
    shutil.copy(path, without_log)
    assert len(stored_outcomes(without_log)) > 20
    await ledger.close()


async def test_a_log_that_cannot_be_moved_fails_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / LEDGER_FILE
    monkeypatch.setattr("tinkerscript.ledger.sqlite.LOG_BYTES", 0)
    ledger = SqliteLedger(path)
    path.rename(tmp_path / "elsewhere.sqlite")
    path.mkdir()
    with pytest.raises(StoreError, match=rf"ledger .*{LEDGER_FILE}: unable to open"):
        await ledger.commit([episode()])
    await ledger.close()


async def test_a_closed_ledger_leaves_no_thread(tmp_path: Path) -> None:
    ledger = SqliteLedger(tmp_path / LEDGER_FILE, durability="full")
    await ledger.commit([episode()])
    (writer,) = [thread for thread in threading.enumerate() if thread.name.startswith("ledger-writer")]
    await ledger.close()
    assert not writer.is_alive()
