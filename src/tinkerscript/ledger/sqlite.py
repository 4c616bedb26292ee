"""`SqliteLedger`: the ledger in one SQLite file.

With durability `normal` (WAL, synchronous=NORMAL) a commit takes tens of microseconds, so it runs on the
event loop; batches over `LONG_BATCH` use a thread. At `LOG_BYTES`, a thread syncs the log into the file. Rows
in `SYNCED` are synced at once. With `full` (synchronous=FULL) a thread syncs each commit.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import astuple

from tinkerscript.errors import StoreError
from tinkerscript.files import stamp
from tinkerscript.ledger.compression import DICTIONARIES
from tinkerscript.ledger.ledger import CALLS_OF_CLAIM, Ledger, WriteBatch
from tinkerscript.ledger.reading import explained
from tinkerscript.ledger.rows import (
    LEDGER_VERSION,
    TABLES,
    PublicationRow,
    Row,
    StepRow,
    columns,
    create_statements,
    on_conflict,
)
from tinkerscript.rollouts.call import Call

LOG_BYTES = 2**22
LONG_BATCH = 1000  # Rows that take about 10 ms.
LONG_BYTES = 2**22  # Payloads, calls and transcripts that take as long.

# A power failure must not repeat a policy version or leave a checkpoint ahead of the ledger.
SYNCED = (PublicationRow, StepRow)

_INODE = "inode"  # Tells an original file from a copy.

_MOVE_LOG = "PRAGMA wal_checkpoint(PASSIVE)"

_CALLS_SIZE = "SELECT coalesce(sum(length(call)), 0) FROM calls WHERE episode = ? AND attempt = ?"


class SqliteLedger(Ledger):
    def __init__(self, path: Path, *, durability: Literal["normal", "full"] = "normal") -> None:
        super().__init__()
        full = durability == "full"
        self._path, self._log = path, f"{path.resolve()}-wal"
        with _explained(path):
            # Used by the event loop, or with `full` the writer thread.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._set_up(full=full)
            self._use_dictionaries(self._connection.execute(_plain(DICTIONARIES)))
            self._reading = sqlite3.connect(path, isolation_level=None)
        self._writer = ThreadPoolExecutor(1, "ledger-writer") if full else None

    async def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._read_all, _plain(sql), parameters)

    async def calls(self, claims: Iterable[tuple[int, int]]) -> list[list[Call]]:
        claims = list(claims)
        with _explained(self._path):
            run = self._reading.execute
            run("BEGIN")  # Each SELECT would lock the file and read its pages anew.
            found = None
            try:
                size = sum(run(_CALLS_SIZE, claim).fetchone()[0] for claim in claims)
                if size < LONG_BYTES:
                    query = _plain(CALLS_OF_CLAIM)
                    found = [self._decoded(run(query, claim).fetchall()) for claim in claims]
            finally:
                run("COMMIT")
        if found is not None:
            return await self.filled(found)
        return await super().calls(claims)

    async def write(self, batch: WriteBatch) -> None:
        if self._writer is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._write, batch)
            return
        if batch.count > LONG_BATCH or batch.size > LONG_BYTES:
            await asyncio.to_thread(self._write, batch)
        else:
            self._write(batch)
        is_synced = any(kind in batch.rows for kind in SYNCED)
        if is_synced or self._log_bytes() > LOG_BYTES:
            await asyncio.to_thread(self._read_all, _MOVE_LOG, ())

    async def release(self) -> None:
        if self._writer is not None:
            self._writer.shutdown()
        self._reading.close()
        # Readers cannot truncate the log, and may close the file last.
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    def _read_all(self, query: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        with _explained(self._path), closing(sqlite3.connect(self._path)) as connection:
            return connection.execute(query, tuple(parameters)).fetchall()

    def _log_bytes(self) -> int:
        try:
            return os.stat(self._log).st_size
        except FileNotFoundError:  # Without shared memory, SQLite has no log.
            return 0

    def _set_up(self, *, full: bool) -> None:
        run = self._connection.execute
        stamp(self._connection, self._path)
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA foreign_keys = ON")
        if full:
            run("PRAGMA synchronous = FULL")
        else:
            run("PRAGMA synchronous = NORMAL")
            run("PRAGMA wal_autocheckpoint = 0")
            run("PRAGMA journal_size_limit = 0")  # Makes the log's file size its length.
        (version,) = run("PRAGMA user_version").fetchone()
        if version == 0:
            run("BEGIN IMMEDIATE")
            for statement in create_statements():
                run(_plain(statement))
            run("INSERT INTO facts VALUES (?, ?)", (_INODE, self._inode()))
            run(f"PRAGMA user_version = {LEDGER_VERSION}")
            run("COMMIT")
        elif version != LEDGER_VERSION:
            raise StoreError(
                f"{self._path} has version {version}, this tinkerscript reads {LEDGER_VERSION}: "
                "use the version of tinkerscript that wrote it, or another run folder"
            )
        else:
            self._check_copy()

    def _check_copy(self) -> None:
        """Check a copied file: one made during a write may mix pages of two states."""
        run, inode = self._connection.execute, self._inode()
        (found,) = run("SELECT value FROM facts WHERE name = ?", (_INODE,)).fetchone()
        if found == inode:
            return
        faults = [text for (text,) in run("PRAGMA integrity_check(1)") if text != "ok"]
        faults += [
            f"a row of {row[0]} refers to a row that does not exist"
            for row in run("PRAGMA foreign_key_check")
        ]
        if faults:
            raise StoreError(explained(self._path, faults[0]))
        run("UPDATE facts SET value = ? WHERE name = ?", (inode, _INODE))

    def _inode(self) -> bytes:
        return str(self._path.stat().st_ino).encode()

    def _write(self, batch: WriteBatch) -> None:
        with _explained(self._path):
            run = self._connection
            run.execute("BEGIN IMMEDIATE")
            try:
                for kind in TABLES:
                    if rows := batch.rows.get(kind):
                        run.executemany(_insert(kind), map(astuple, rows.values()))
                for sql, same in groupby(batch.statements, key=attrgetter("sql")):
                    run.executemany(_plain(sql), [each.parameters for each in same])
                run.execute("COMMIT")
            finally:
                if run.in_transaction:
                    run.execute("ROLLBACK")


@cache
def _insert(kind: type[Row]) -> str:
    names = columns(kind)
    marks = ", ".join("?" * len(names))
    return f"INSERT INTO {kind.TABLE} ({', '.join(names)}) VALUES ({marks}){on_conflict(kind)}"


def _plain(sql: str) -> str:
    return sql.replace("{s}", "")


@contextmanager
def _explained(path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(explained(path, error)) from error
