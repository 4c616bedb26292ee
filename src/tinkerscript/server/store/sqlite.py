"""`SqliteStore`: the episodes of a run in one SQLite file.

Invariant: rows of finished episodes stay, without payload, result, calls and transcripts, so that a run can
be audited. With durability `normal` (WAL, synchronous=NORMAL) a commit survives kill -9 but not a power cut;
it takes tens of microseconds and happens on the event loop. A thread commits more than `LONG_BATCH` writes,
and syncs the file, which takes a disk milliseconds, whenever the log has grown to `LOG_BYTES`; the next
commits wait for it, and nothing else does.
With `full` (synchronous=FULL) each commit syncs the file, in a thread, and survives a power cut too.
The calls of a claim are read on the event loop, in microseconds, and whole tables in a thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import TypeAdapter

from tinkerscript.errors import StoreError
from tinkerscript.files import stamp
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.episode_store import EpisodeStore, WriteBatch
from tinkerscript.trainer_link.messages import RecordedOutcome

T = TypeVar("T")

STORE_FILE = "server.sqlite"
"""In the run's folder."""

LOG_BYTES = 2**22
"""Of the write-ahead log, after which it is moved into the file and begins anew."""

LONG_BATCH = 1000
"""Writes of one transaction, about 10 ms of work. A larger transaction is committed in a thread."""

LONG_BYTES = 2**22
"""Of payloads, calls and transcripts, which take as long to write or to read."""

SCHEMA_VERSION = 3

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE episodes (
    sequence INTEGER PRIMARY KEY,
    uuid TEXT NOT NULL UNIQUE,
    episode_type TEXT NOT NULL,
    group_id TEXT NOT NULL,
    digest BLOB NOT NULL,
    pool TEXT NOT NULL,
    group_size INTEGER NOT NULL,
    state TEXT NOT NULL,
    claimants TEXT NOT NULL,
    request_ids TEXT NOT NULL,
    forgiven INTEGER NOT NULL,
    lease_s REAL NOT NULL,
    claimed_at REAL NOT NULL,
    policy_version INTEGER NOT NULL,
    reward REAL,
    result_digest BLOB NOT NULL,
    failures TEXT NOT NULL,
    offered INTEGER NOT NULL,
    acknowledged INTEGER NOT NULL,
    dropped INTEGER NOT NULL
);
CREATE TABLE payloads (sequence INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE results (sequence INTEGER PRIMARY KEY, result BLOB NOT NULL);
CREATE TABLE calls (
    number INTEGER PRIMARY KEY,
    sequence INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    call BLOB NOT NULL
);
CREATE INDEX calls_of_claim ON calls (sequence, attempt);
CREATE TABLE transcripts (
    sequence INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    transcript BLOB NOT NULL,
    PRIMARY KEY (sequence, attempt)
);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""

_IDENTITY = ("sequence", "uuid", "episode_type", "group_id", "digest", "pool", "group_size")

_PROGRESS = (
    *("state", "claimants", "request_ids", "forgiven", "lease_s", "claimed_at", "policy_version"),
    *("reward", "result_digest", "failures", "offered", "acknowledged", "dropped"),
)

_COLUMNS = _IDENTITY + _PROGRESS

_INSERT = f"INSERT INTO episodes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"

_UPDATE = f"UPDATE episodes SET {', '.join(f'{name} = ?' for name in _PROGRESS)} WHERE sequence = ?"

_LOAD = f"""
SELECT {", ".join(_COLUMNS)}, coalesce(payload, x'') AS payload, coalesce(result, x'') AS result
    FROM episodes
    LEFT JOIN payloads USING (sequence) LEFT JOIN results USING (sequence) ORDER BY sequence
"""

_CALLS_SIZE = "SELECT coalesce(sum(length(call)), 0) FROM calls WHERE sequence = ? AND attempt = ?"
_CALLS = "SELECT call FROM calls WHERE sequence = ? AND attempt = ? ORDER BY number"

_TRANSCRIBED = "SELECT DISTINCT sequence FROM transcripts WHERE sequence IN (SELECT value FROM json_each(?))"
_TRANSCRIPTS = "SELECT attempt, transcript FROM transcripts WHERE sequence = ?"

_MOVE_LOG = "PRAGMA wal_checkpoint(PASSIVE)"

_OUTCOMES = "SELECT uuid, state, acknowledged FROM episodes WHERE uuid IN ({})"

_failures = TypeAdapter(list[Failure])

_encode_call = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode


class SqliteStore(EpisodeStore):
    """One file. `EpisodeStore` says what shares a transaction."""

    def __init__(self, path: Path, *, durability: Literal["normal", "full"] = "normal") -> None:
        """Opens or creates the file. Raises StoreError for a file of another schema version."""
        super().__init__()
        full = durability == "full"
        self._path, self._log = path, f"{path.resolve()}-wal"
        with _explained(path):
            # The writing connection is used on the event loop, or with `full` by the writing thread alone.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._set_up(full=full)
            self._reading = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._writer = ThreadPoolExecutor(1, "episode-store-writer") if full else None

    async def load(self) -> list[EpisodeRecord]:
        return await asyncio.to_thread(self._read_all, _LOAD, (), _episode)

    async def calls(self, claims: Sequence[tuple[EpisodeRecord, int]]) -> list[list[Call]]:
        keys = [(episode.sequence, attempt) for episode, attempt in claims]
        with _explained(self._path):
            size = sum(self._reading.execute(_CALLS_SIZE, key).fetchone()[0] for key in keys)
            if size < LONG_BYTES:
                return [list(map(_call, self._reading.execute(_CALLS, key))) for key in keys]
        return [await asyncio.to_thread(self._read_all, _CALLS, key, _call) for key in keys]

    async def transcribed(self, episodes: Sequence[EpisodeRecord]) -> set[str]:
        uuids = {episode.sequence: episode.uuid for episode in episodes}
        with _explained(self._path):
            rows = self._reading.execute(_TRANSCRIBED, (json.dumps(list(uuids)),)).fetchall()
        return {uuids[sequence] for (sequence,) in rows}

    async def transcripts(self, episode: EpisodeRecord) -> dict[int, bytes]:
        with _explained(self._path):
            return dict(self._reading.execute(_TRANSCRIPTS, (episode.sequence,)).fetchall())

    async def outcomes(self, episode_uuids: Sequence[str]) -> dict[str, RecordedOutcome]:
        query = _OUTCOMES.format(", ".join("?" * len(episode_uuids)))
        rows = await asyncio.to_thread(self._read_all, query, tuple(episode_uuids), tuple)
        return {uuid: RecordedOutcome(state, bool(acknowledged)) for uuid, state, acknowledged in rows}

    async def write(self, batch: WriteBatch) -> None:
        statements = list(_statements(batch))
        if self._writer is not None:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._write, statements)
            return
        if batch.count > LONG_BATCH or batch.size > LONG_BYTES:
            await asyncio.to_thread(self._write, statements)
        else:
            self._write(statements)
        if self._log_bytes() > LOG_BYTES:  # All of it: nobody writes meanwhile.
            await asyncio.to_thread(self._read_all, _MOVE_LOG, (), tuple)

    async def release(self) -> None:
        if self._writer is not None:
            self._writer.shutdown()
        self._reading.close()
        self._connection.close()

    def _read_all(
        self, query: str, parameters: tuple[Any, ...], decode: Callable[[tuple[Any, ...]], T]
    ) -> list[T]:
        """The decoded rows of `query`, read with a connection of its own."""
        with _explained(self._path), closing(sqlite3.connect(self._path)) as connection:
            return [decode(row) for row in connection.execute(query, parameters)]

    def _log_bytes(self) -> int:
        try:
            return os.stat(self._log).st_size
        except FileNotFoundError:  # SQLite does without where the file system has no shared memory.
            return 0

    def _set_up(self, *, full: bool) -> None:
        run = self._connection.execute
        stamp(self._connection, self._path)
        run("PRAGMA journal_mode = WAL")
        if full:
            run("PRAGMA synchronous = FULL")
        else:
            run("PRAGMA synchronous = NORMAL")
            run("PRAGMA wal_autocheckpoint = 0")  # `write` does it.
            run("PRAGMA journal_size_limit = 0")  # So that the log's file is as long as the log.
        (version,) = run("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.executescript(_SCHEMA)
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} has schema version {version}, this server reads {SCHEMA_VERSION}: "
                "use the version of tinkerscript that wrote it, or another run folder"
            )

    def _write(self, statements: list[tuple[str, list[tuple[Any, ...]]]]) -> None:
        with _explained(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for statement, rows in statements:
                    if rows:
                        self._connection.executemany(statement, rows)
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")


def _statements(batch: WriteBatch) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """The statements of a transaction, each with the rows that it runs for."""
    new, changed = batch.added.values(), batch.saved.values()
    yield _INSERT, [(*_identity(episode), *_progress(episode)) for episode in new]
    yield "INSERT INTO payloads VALUES (?, ?)", [(episode.sequence, episode.payload) for episode in new]
    yield _UPDATE, [(*_progress(episode), episode.sequence) for episode in changed]
    ended = [(e.sequence, e.result) for e in (*new, *changed) if e.state == "ended"]
    yield "INSERT OR REPLACE INTO results VALUES (?, ?)", ended
    calls = [(e.sequence, attempt, _encode_call(call)) for e, attempt, call in batch.calls]
    yield "INSERT INTO calls (sequence, attempt, call) VALUES (?, ?, ?)", calls
    transcripts = [(e.sequence, attempt, transcript) for e, attempt, transcript in batch.transcripts]
    yield "INSERT OR REPLACE INTO transcripts VALUES (?, ?, ?)", transcripts
    dropped = [(episode.sequence, attempt) for episode, attempt in batch.dropped]
    yield "DELETE FROM calls WHERE sequence = ? AND attempt = ?", dropped
    over = [(episode.sequence,) for episode in (*new, *changed) if episode.acknowledged]
    for table in ("payloads", "results", "calls", "transcripts"):
        yield f"DELETE FROM {table} WHERE sequence = ?", over


def _identity(episode: EpisodeRecord) -> tuple[Any, ...]:
    """The columns of `_IDENTITY`."""
    return (
        episode.sequence,
        episode.uuid,
        episode.episode_type,
        episode.group_id,
        episode.digest,
        episode.pool,
        episode.group_size,
    )


def _progress(episode: EpisodeRecord) -> tuple[Any, ...]:
    """The columns of `_PROGRESS`."""
    return (
        episode.state,
        msgspec.json.encode(episode.claimants).decode(),
        msgspec.json.encode(episode.request_ids).decode(),
        episode.forgiven,
        episode.lease_s,
        episode.claimed_at,
        episode.policy_version,
        episode.reward,
        episode.result_digest,
        _failures.dump_json(episode.failures).decode() if episode.failures else "[]",
        episode.offered,
        episode.acknowledged,
        episode.dropped,
    )


def _call(row: tuple[Any, ...]) -> Call:
    return _decode_call(row[0])


def _episode(row: tuple[Any, ...]) -> EpisodeRecord:
    fields = dict(zip((*_COLUMNS, "payload", "result"), row, strict=True))
    fields["claimants"] = json.loads(fields["claimants"])
    fields["request_ids"] = json.loads(fields["request_ids"])
    fields["failures"] = _failures.validate_json(fields["failures"])
    for name in ("offered", "acknowledged", "dropped"):
        fields[name] = bool(fields[name])
    return EpisodeRecord(**fields)


@contextmanager
def _explained(path: Path) -> Generator[None]:
    """SQLite's errors as a StoreError that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"episode file {path}: {error}") from error
