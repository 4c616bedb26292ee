"""`RecordWriter`: writes a run's record from a thread of its own.

Invariant: no call waits for the disk or raises. What cannot be written (a full disk, a backlog) is counted
and named, and the run goes on. While another program has the file locked, entries wait in memory, up to a
limit, and are written when it lets go.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tinkerscript.record.entries import (
    RecordedEpisode,
    TrainedEpisode,
    columns_of,
    packed,
    searched_text,
)
from tinkerscript.record.schema import open_for_writing, take_back

MAX_BACKLOG = 10_000
"""Entries that may wait for the disk."""

MAX_BACKLOG_BYTES = 512 * 2**20
"""Of their calls, tokens and transcripts."""

LOCKED_RETRY_S = 0.1
"""Before another try at a locked file, besides the seconds that SQLite itself waits for the lock."""

CLOSE_PATIENCE_S = 10.0
"""How long the end of a run waits for a locked file."""

COMMIT_EVERY_S = 0.2
"""What happens within this time shares a transaction."""

Write = Callable[[sqlite3.Connection], object]


class Entry(NamedTuple):
    """What waits to be written."""

    write: Write
    size: int
    """Of its calls and tokens, in bytes."""


BAD_VALUES = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)
"""What SQLite raises for an entry that it cannot hold. Other errors of its own are the file's."""

LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Codes of a file that another program writes or copies."""

_OLDEST = """
SELECT min(number) FROM (
    SELECT min(episode) AS number FROM details
    UNION ALL SELECT min(episode) FROM transcripts
    UNION ALL SELECT min(episode) FROM trained WHERE sequences IS NOT NULL
)
"""
"""The number of the oldest episode of which there are calls, tokens or transcripts."""

logger = logging.getLogger(__name__)


class RecordWriter:
    """Use as a context manager; leaving it writes what is left."""

    def __init__(
        self,
        path: Path,
        *,
        limit_mb: int = 0,
        failed: Callable[[str], None] = lambda reason: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Opens or makes the file. `limit_mb`: of the calls, tokens and transcripts, of which the oldest are
        dropped beyond it; 0: no limit. `failed` is called once, from the thread or from here, if nothing can
        be written any more; `note` when entries begin to wait for a lock, and when they are written.

        Raises ConfigError for a record of another version.
        """
        self._path = path
        self.folder = path.parent
        self._limit = StorageLimit(limit_mb)
        self._failed = failed
        self._note = note
        self._connection: sqlite3.Connection | None = None
        self._names: dict[str, int] = {}
        self._status: dict[str, Any] = {}
        self._pending: list[Entry] = []
        self._pending_bytes = 0
        self._locked_since: float | None = None
        self._dropped_before_lock = 0
        self._changed = threading.Condition()
        self._written = self._given = 0
        """Numbers of the last entry that is committed, and of the last one."""

        self._wanted = 0
        """Number of the last entry that somebody waits for."""

        self._closing_since: float | None = None

        self.dropped = 0
        """Entries that were not written: the disk was too slow, or failed."""

        self.failure = ""
        """Why nothing can be written any more; empty if it can."""

        self._thread: threading.Thread | None = None
        try:
            self._open()
        except (sqlite3.Error, OSError) as error:
            if not self._may_be_unlocked(error):
                self._give_up(error)
                return
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def _open(self) -> sqlite3.Connection:
        """The connection, opened if it is not yet."""
        if self._connection is None:
            run = open_for_writing(self._path)
            try:
                self._names = _numbered_names(run)
                self._limit.count(run)
            except BaseException:
                run.close()
                raise
            self._connection = run
        return self._connection

    # What there is to say

    def status(self, **values: Any) -> None:
        """Facts about the run by name, such as what it waits for; each replaces the former."""
        with self._changed:
            if not self.failure:
                self._status |= values
                self._given += 1
                self._changed.notify_all()

    def episode(self, episode: RecordedEpisode, *, with_tokens: bool = True) -> None:
        """An episode that ended; without its tokens only its row. A second time is ignored."""
        self._put(lambda run: self._add_episode(run, episode, with_tokens), episode.detail.size())

    def transcript(self, uuid: str, attempt: int, transcript: bytes) -> None:
        """The transcript of one attempt at an episode that was given before."""
        self._put(lambda run: self._add_transcript(run, uuid, attempt, transcript), len(transcript))

    def trained(self, step: int, episodes: Sequence[TrainedEpisode]) -> None:
        """What a step did with its episodes."""
        size = sum(sequence.size() for episode in episodes for sequence in episode.sequences)
        self._put(lambda run: self._add_trained(run, step, episodes), size)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers by name; those that are not finite are left out. One that the step has is replaced."""
        values = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._put(lambda run: self._add_metrics(run, step, values))

    def step(self, step: int, **columns: float | None) -> None:
        """A row of `steps`."""
        self._row("steps", step=step, time=time.time(), **columns)

    def evaluation(self, **columns: object) -> None:
        """A row of `evaluations`."""
        self._row("evaluations", time=time.time(), **columns)

    def finding(self, **columns: object) -> None:
        """A row of `findings`."""
        self._row("findings", **columns)

    def note(self, text: str) -> None:
        """What the run told its user."""
        self._row("notes", time=time.time(), text=text)

    def resume(self, step: int, *, kept: Container[str] = ()) -> None:
        """The run begins, or continues after `step`: take back what later steps left.

        Their episodes stay and are marked as undone, unless they are `kept` (uuids) for a step that is
        repeated; so are those of evaluations that have no score, which will be repeated.
        """

        def begin(run: sqlite3.Connection) -> None:
            take_back(run, step)
            run.execute("INSERT INTO resumes (step, time) VALUES (?, ?)", (step, time.time()))
            _undo(run, [number for number, uuid in run.execute(_LATER, (step,)) if uuid not in kept])
            _undo(run, [number for (number,) in run.execute(_WITHOUT_SCORE)])
            self._limit.count(run)

        self._put(begin)

    def _row(self, table: str, **columns: object) -> None:
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        statement = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"
        self._put(lambda run: run.execute(statement, tuple(columns.values())))

    # The thread

    def _put(self, write: Write, size: int = 0) -> None:
        with self._changed:
            # One that is larger than the limit by itself waits alone.
            room = max(MAX_BACKLOG_BYTES, size) - self._pending_bytes
            is_full = len(self._pending) >= MAX_BACKLOG or size > room
            if self.failure or self._closing_since is not None or is_full:
                self.dropped += 1
                return
            self._pending.append(Entry(write, size))
            self._pending_bytes += size
            self._given += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was given so far is committed; whether it is."""
        with self._changed:
            given = self._wanted = self._given
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self.failure) or self._written >= given, timeout_s)
            return not self.failure and self._written >= given

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing_since = time.monotonic()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        while self._has_work():
            with self._changed:
                entries, status, given = list(self._pending), dict(self._status), self._given
            try:
                lost = self._commit(self._open(), entries, status)
            except Exception as error:  # noqa: BLE001 - the run goes on, whatever is wrong with its record
                if not self._may_be_unlocked(error):
                    self._give_up(error)
                    return
                time.sleep(LOCKED_RETRY_S)
            else:
                self._is_committed(entries, status, given, lost)

    def _has_work(self) -> bool:
        """Wait for something to write; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._status or self._closing_since is not None)
            if not (self._pending or self._status):
                return False
            self._changed.wait_for(
                lambda: self._closing_since is not None or self._wanted > self._written, COMMIT_EVERY_S
            )
            return True

    def _is_committed(
        self, entries: Sequence[Entry], status: Mapping[str, Any], given: int, lost: int
    ) -> None:
        with self._changed:
            del self._pending[: len(entries)]
            self._pending_bytes -= sum(entry.size for entry in entries)
            self._status = {
                name: value
                for name, value in self._status.items()
                if name not in status or status[name] is not value
            }
            self.dropped += lost
            self._written = given
            since, self._locked_since = self._locked_since, None
            missing = self.dropped - self._dropped_before_lock
            self._changed.notify_all()
        if since is not None:
            seconds = time.monotonic() - since
            left_out = (
                f"without {missing} entries for which there was no room" if missing else "nothing is lost"
            )
            self._note(f"{self._path.name} is written again after {seconds:.0f} s: {left_out}")

    def _may_be_unlocked(self, error: Exception) -> bool:
        """Whether to try again: another program has locked the file, and there is time."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
        if code & 0xFF not in LOCKED:  # Above are details.
            return False
        if self._locked_since is None:
            self._locked_since, self._dropped_before_lock = time.monotonic(), self.dropped
            logger.warning("record.locked %s: %s", self._path, error)
            self._note(
                f"{self._path.name} is locked by another program ({error}): what the run does is kept "
                "in memory and written when it lets go"
            )
        return self._closing_since is None or time.monotonic() - self._closing_since < CLOSE_PATIENCE_S

    def _commit(self, run: sqlite3.Connection, entries: Sequence[Entry], status: Mapping[str, Any]) -> int:
        """How many entries could not be written, because of what they hold."""
        names, stored = dict(self._names), self._limit.stored
        run.execute("BEGIN IMMEDIATE")
        try:
            lost = sum(not self._is_written(run, entry.write) for entry in entries)
            rows = [(name, json.dumps(value, default=str)) for name, value in status.items()]
            run.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", rows)
            self._limit.keep(run)
            run.execute("COMMIT")
            return lost
        finally:
            if run.in_transaction:
                run.execute("ROLLBACK")
                self._names, self._limit.stored = names, stored

    def _is_written(self, run: sqlite3.Connection, write: Write) -> bool:
        """Write one entry. What a program put into messages and metadata may be what no file can hold."""
        run.execute("SAVEPOINT entry")
        try:
            write(run)
        except Exception as error:
            if isinstance(error, sqlite3.Error | OSError) and not isinstance(error, BAD_VALUES):
                raise
            logger.warning("record.entry_dropped %s: %s", type(error).__name__, error)
            run.execute("ROLLBACK TO entry")
            self._names = _numbered_names(run)
            return False
        finally:
            if run.in_transaction:
                run.execute("RELEASE entry")
        return True

    def _give_up(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        with self._changed:
            self.failure = reason
            self.dropped += len(self._pending)
            self._pending, self._status, self._pending_bytes = [], {}, 0
            self._changed.notify_all()
        self._failed(reason)

    # Rows

    def _add_metrics(self, run: sqlite3.Connection, step: int, metrics: Mapping[str, float]) -> None:
        for name in sorted(metrics.keys() - self._names.keys()):
            number = len(self._names) + 1
            run.execute("INSERT INTO names VALUES (?, ?)", (number, name))
            self._names[name] = number
        rows = [(self._names[name], step, float(value)) for name, value in metrics.items()]
        run.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)

    def _add_episode(self, run: sqlite3.Connection, episode: RecordedEpisode, with_tokens: bool) -> None:
        if run.execute("SELECT 1 FROM episodes WHERE uuid = ?", (episode.uuid,)).fetchone():
            return
        detail = episode.detail
        columns = columns_of(episode) | {"sample": self._sample(run, episode)}
        statement = f"INSERT INTO episodes ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        number = run.execute(statement, tuple(columns.values())).lastrowid
        if with_tokens:
            data = packed(detail)
            run.execute("INSERT INTO details VALUES (?, ?)", (number, data))
            self._limit.add(len(data))
        text = searched_text(
            episode.uuid, episode.group_id, episode.task, episode.client_uuid, detail=episode.detail
        )
        run.execute("INSERT INTO words (rowid, body) VALUES (?, ?)", (number, text))

    def _add_transcript(self, run: sqlite3.Connection, uuid: str, attempt: int, transcript: bytes) -> None:
        row = run.execute("SELECT number FROM episodes WHERE uuid = ?", (uuid,)).fetchone()
        statement = "INSERT OR IGNORE INTO transcripts (episode, attempt, transcript) VALUES (?, ?, ?)"
        if row is not None and run.execute(statement, (row[0], attempt, transcript)).rowcount:
            self._limit.add(len(transcript))

    def _sample(self, run: sqlite3.Connection, episode: RecordedEpisode) -> int | None:
        """The number of its sample. Two samples are the same if task and content are."""
        if episode.sample is None:
            return None
        data = msgspec.json.encode(episode.sample)
        digest = hashlib.sha256(episode.task.encode() + b"\0" + data).digest()[:16]
        found = run.execute("SELECT number FROM samples WHERE digest = ?", (digest,)).fetchone()
        if found:
            return found[0]
        name = str(episode.sample.get("id", ""))
        row = (digest, episode.task, name, data)
        return run.execute(
            "INSERT INTO samples (digest, task, id, sample) VALUES (?, ?, ?, ?)", row
        ).lastrowid

    def _add_trained(self, run: sqlite3.Connection, step: int, episodes: Sequence[TrainedEpisode]) -> None:
        for episode in episodes:
            found = run.execute("SELECT number FROM episodes WHERE uuid = ?", (episode.uuid,)).fetchone()
            if found is None:
                continue
            data = packed(episode.sequences) if episode.sequences else None
            former = "DELETE FROM trained WHERE episode = ? AND step = ? RETURNING length(sequences)"
            for (length,) in run.execute(former, (found[0], step)).fetchall():
                self._limit.add(-(length or 0))
            row = (found[0], step, episode.outcome, episode.advantage, data)
            run.execute("INSERT INTO trained VALUES (?, ?, ?, ?, ?)", row)
            self._limit.add(len(data or b""))


_LATER = "SELECT number, uuid FROM episodes WHERE type = 'train' AND step > ?"
_WITHOUT_SCORE = """
SELECT number FROM episodes WHERE label != '' AND label NOT IN (SELECT label FROM evaluations)
"""


def _undo(run: sqlite3.Connection, episodes: Iterable[int]) -> None:
    run.executemany(
        "INSERT OR IGNORE INTO undone (episode, resume) VALUES (?, (SELECT max(number) FROM resumes))",
        [(number,) for number in episodes],
    )


def _numbered_names(run: sqlite3.Connection) -> dict[str, int]:
    return dict(run.execute("SELECT name, number FROM names").fetchall())


def checkpoint(path: Path) -> None:
    """Fold the write-ahead log into the file, so that it can be copied by itself. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class StorageLimit:
    """Bounds a record's calls, tokens and transcripts: over the limit, the oldest episodes lose theirs.

    Their rows stay.
    """

    def __init__(self, limit_mb: int) -> None:
        """0: no limit."""
        self._limit = limit_mb * 2**20
        self.stored = 0
        """Bytes of calls, tokens and transcripts in the file."""

    def count(self, run: sqlite3.Connection) -> None:
        """Read what is stored. Reads all of it."""
        (details,) = run.execute("SELECT coalesce(sum(length(detail)), 0) FROM details").fetchone()
        query = "SELECT coalesce(sum(length(sequences)), 0) FROM trained WHERE sequences IS NOT NULL"
        (sequences,) = run.execute(query).fetchone()
        query = "SELECT coalesce(sum(length(transcript)), 0) FROM transcripts"
        (transcripts,) = run.execute(query).fetchone()
        self.stored = details + sequences + transcripts

    def add(self, size: int) -> None:
        """Bytes that were written; below 0: deleted."""
        self.stored += size

    def keep(self, run: sqlite3.Connection) -> None:
        """Drop what is stored of the oldest episodes until the rest is within the limit."""
        while self._limit and self.stored > self._limit:
            (oldest,) = run.execute(_OLDEST).fetchone()
            if oldest is None:
                return
            for query in (
                "DELETE FROM details WHERE episode = ? RETURNING length(detail)",
                "DELETE FROM transcripts WHERE episode = ? RETURNING length(transcript)",
                "SELECT length(sequences) FROM trained WHERE episode = ? AND sequences IS NOT NULL",
            ):
                self.stored -= sum(length for (length,) in run.execute(query, (oldest,)).fetchall())
            run.execute("UPDATE trained SET sequences = NULL WHERE episode = ?", (oldest,))
