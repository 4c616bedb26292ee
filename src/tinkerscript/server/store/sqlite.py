"""`SqliteStore`: the episodes of a run in one SQLite file.

Durability `normal` is WAL with synchronous=NORMAL: a commit survives kill -9, not a power cut; it takes tens
of microseconds and happens on the event loop, and every thousand pages or so it also syncs the file. `full`
is synchronous=FULL: each commit syncs the file, in a thread of its own, and survives a power cut too. The
rows of episodes that are over stay, without payload, result and calls: `read_outcomes` can audit a run.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import TypeAdapter

from tinkerscript.errors import StoreError
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.base import EpisodeStore, WriteBatch

STORE_FILE = "server.sqlite"
"""In the run's folder."""


SCHEMA_VERSION = 2


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


_failures = TypeAdapter(list[Failure])


_encode_call = msgspec.msgpack.Encoder().encode


_decode_call = msgspec.msgpack.Decoder(Call).decode


class SqliteStore(EpisodeStore):
    """One file; see `EpisodeStore` for what shares a transaction."""

    def __init__(self, path: Path, *, durability: Literal["normal", "full"] = "normal") -> None:
        """Opens or makes the file. Raises StoreError for a file of another schema version."""
        full = durability == "full"
        super().__init__(in_thread=full)
        self._path = path
        with _explained(path):
            # One thread at a time uses the connection that writes: the store's, or at the end another.
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._set_up("FULL" if full else "NORMAL")
            self._reader = sqlite3.connect(path, isolation_level=None) if full else self._connection

    def load(self) -> list[EpisodeRecord]:
        with _explained(self._path):
            return [_episode(row) for row in self._reader.execute(_LOAD)]

    def calls(self, episode: EpisodeRecord, attempt: int) -> list[Call]:
        query = "SELECT call FROM calls WHERE sequence = ? AND attempt = ? ORDER BY number"
        with _explained(self._path):
            rows = self._reader.execute(query, (episode.sequence, attempt))
            return [_decode_call(call) for (call,) in rows]

    def close(self) -> None:
        try:
            self._end()
        finally:
            self._reader.close()
            self._connection.close()

    def _set_up(self, synchronous: str) -> None:
        run = self._connection.execute
        run("PRAGMA journal_mode = WAL")
        run(f"PRAGMA synchronous = {synchronous}")
        (version,) = run("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.executescript(_SCHEMA)
        elif version != SCHEMA_VERSION:
            raise StoreError(
                f"{self._path} has schema version {version}, this server reads {SCHEMA_VERSION}: "
                "use the version of tinkerscript that wrote it, or another run folder"
            )

    def _prepare(self, batch: WriteBatch) -> Callable[[], None]:
        statements = list(_statements(batch))

        def write() -> None:
            with _explained(self._path):
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    for statement, rows in statements:
                        self._connection.executemany(statement, rows)
                    self._connection.execute("COMMIT")
                finally:
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")

        return write


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
    dropped = [(episode.sequence, attempt) for episode, attempt in batch.dropped]
    yield "DELETE FROM calls WHERE sequence = ? AND attempt = ?", dropped
    over = [(episode.sequence,) for episode in (*new, *changed) if episode.acknowledged]
    for table in ("payloads", "results", "calls"):
        yield f"DELETE FROM {table} WHERE sequence = ?", over


def read_outcomes(path: Path) -> dict[str, str]:
    """The state of every episode in a server's file, by uuid. Opens it read-only, also while it is served.

    Raises StoreError.
    """
    with (
        _explained(path),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection,
    ):
        return dict(connection.execute("SELECT uuid, state FROM episodes"))


def read_acknowledged(path: Path) -> set[str]:
    """The episodes whose outcome a trainer had in its journal, in a server's file. Raises StoreError."""
    with (
        _explained(path),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection,
    ):
        return {uuid for (uuid,) in connection.execute("SELECT uuid FROM episodes WHERE acknowledged")}


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
    """SQLite's errors as StoreError that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the episode file {path}: {error}") from error
