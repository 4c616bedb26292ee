"""`RecordWriter`: writes a run's record from a thread of its own.

Invariant: no call waits for the disk or raises. What cannot be written (a full disk, a backlog) is counted
and named, and the run goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from tinkerscript.record.entries import EpisodeDetail, RecordedEpisode, TrainedEpisode, packed
from tinkerscript.record.schema import open_for_writing
from tinkerscript.rollouts.call import Call

MAX_BACKLOG = 10_000
"""Entries that may wait for the disk."""

PREVIEW_CHARS = 160
MAX_INDEXED_CHARS = 65_536
"""Of an episode's text, for the search."""

COMMIT_EVERY_S = 0.2
"""What happens within this time shares a transaction."""

Write = Callable[[sqlite3.Connection], object]

INTERRUPTED = " (interrupted)"
"""Ends the label of episodes of an evaluation that a kill kept from its score: a resumed run repeats it."""

BAD_VALUES = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)
"""What SQLite raises for an entry that it cannot hold. Other errors of its own are the file's."""

logger = logging.getLogger(__name__)


class RecordWriter:
    """Use as a context manager; leaving it writes what is left."""

    def __init__(
        self, path: Path, *, limit_mb: int = 0, failed: Callable[[str], None] = lambda reason: None
    ) -> None:
        """Opens or makes the file. `limit_mb`: of the calls and tokens, of which the oldest are dropped
        beyond it; 0: no limit. `failed` is called once, from the thread or from here, if nothing can be
        written any more.

        Raises ConfigError for a record of another version.
        """
        self._path = path
        self._limit = limit_mb * 2**20
        self._failed = failed
        self._connection: sqlite3.Connection | None = None
        self._names: dict[str, int] = {}
        self._bytes = 0
        self._status: dict[str, Any] = {}
        self._pending: list[Write] = []
        self._changed = threading.Condition()
        self._written = self._given = 0
        """Numbers of the last entry that is committed, and of the last one."""

        self._wanted = 0
        """Number of the last entry that somebody waits for."""

        self._closing = False
        self.dropped = 0
        """Entries that were not written: the disk was too slow, or failed."""

        self.failure = ""
        """Why nothing can be written any more; empty if it can."""

        self._thread: threading.Thread | None = None
        try:
            run = self._connection = open_for_writing(path)
            self._names = _numbered_names(run)
            self._bytes = _stored_bytes(run)
        except (sqlite3.Error, OSError) as error:
            self._give_up(error, lost=0)
        else:
            self._thread = threading.Thread(target=self._run, args=(run,), name="record", daemon=True)
            self._thread.start()

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
        self._put(lambda run: self._add_episode(run, episode, with_tokens))

    def trained(self, step: int, episodes: Sequence[TrainedEpisode]) -> None:
        """What a step did with its episodes."""
        self._put(lambda run: self._add_trained(run, step, episodes))

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

    def resume(self, step: int) -> None:
        """The run continues after `step`: take back what later steps left. Their episodes stay; those of
        evaluations that will be repeated are marked (`INTERRUPTED`)."""

        def take_back(run: sqlite3.Connection) -> None:
            for table in ("metrics", "steps", "trained", "evaluations", "findings"):
                run.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
            run.execute(
                "UPDATE episodes SET label = label || :mark WHERE label != '' AND instr(label, :mark) = 0 "
                "AND label NOT IN (SELECT label FROM evaluations)",
                {"mark": INTERRUPTED},
            )
            self._bytes = _stored_bytes(run)

        self._put(take_back)

    def _row(self, table: str, **columns: object) -> None:
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        statement = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"
        self._put(lambda run: run.execute(statement, tuple(columns.values())))

    # The thread

    def _put(self, write: Write) -> None:
        with self._changed:
            if self.failure or self._closing or len(self._pending) >= MAX_BACKLOG:
                self.dropped += 1
                return
            self._pending.append(write)
            self._given += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was given so far is committed; whether it is."""
        with self._changed:
            given = self._wanted = self._given
            self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self.failure) or self._written >= given, timeout_s)
            return not self.failure and self._written >= given

    def episode_uuids(self) -> set[str]:
        """The episodes that are in the file. Reads all of it; for a run that begins."""
        if self.failure:
            return set()
        try:
            with closing(sqlite3.connect(self._path)) as connection:
                return {uuid for (uuid,) in connection.execute("SELECT uuid FROM episodes")}
        except sqlite3.Error:
            return set()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._connection is not None:
            self._connection.close()

    def _run(self, run: sqlite3.Connection) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._status or self._closing)
                if not (self._pending or self._status):
                    return
                self._changed.wait_for(lambda: self._closing or self._wanted > self._written, COMMIT_EVERY_S)
                writes, self._pending = self._pending, []
                status, self._status = self._status, {}
                given = self._given
            try:
                lost = self._commit(run, writes, status)
            except Exception as error:  # noqa: BLE001 - the run goes on, whatever is wrong with its record
                self._give_up(error, lost=len(writes))
                return
            with self._changed:
                self.dropped += lost
                self._written = given
                self._changed.notify_all()

    def _commit(self, run: sqlite3.Connection, writes: list[Write], status: Mapping[str, Any]) -> int:
        """How many entries could not be written, because of what they hold."""
        run.execute("BEGIN IMMEDIATE")
        try:
            lost = sum(not self._is_written(run, write) for write in writes)
            rows = [(name, json.dumps(value, default=str)) for name, value in status.items()]
            run.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", rows)
            self._keep_within_limit(run)
            run.execute("COMMIT")
            return lost
        finally:
            if run.in_transaction:
                run.execute("ROLLBACK")

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

    def _give_up(self, error: Exception, *, lost: int) -> None:
        reason = f"{type(error).__name__}: {error}"
        with self._changed:
            self.failure = reason
            self.dropped += lost + len(self._pending)
            self._pending, self._status = [], {}
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
        columns = _columns(episode) | {"sample": self._sample(run, episode)}
        statement = f"INSERT INTO episodes ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        number = run.execute(statement, tuple(columns.values())).lastrowid
        if with_tokens:
            data = packed(detail)
            run.execute("INSERT INTO details VALUES (?, ?)", (number, data))
            self._bytes += len(data)
        run.execute("INSERT INTO words (rowid, body) VALUES (?, ?)", (number, _text_of(episode)))

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
                self._bytes -= length or 0
            row = (found[0], step, episode.outcome, episode.advantage, data)
            run.execute("INSERT INTO trained VALUES (?, ?, ?, ?, ?)", row)
            self._bytes += len(data or b"")

    def _keep_within_limit(self, run: sqlite3.Connection) -> None:
        """Drop the calls and tokens of the oldest episodes; their rows stay."""
        while self._limit and self._bytes > self._limit:
            (oldest,) = run.execute(_OLDEST).fetchone()
            if oldest is None:
                return
            for query in (
                "DELETE FROM details WHERE episode = ? RETURNING length(detail)",
                "SELECT length(sequences) FROM trained WHERE episode = ? AND sequences IS NOT NULL",
            ):
                self._bytes -= sum(length for (length,) in run.execute(query, (oldest,)).fetchall())
            run.execute("UPDATE trained SET sequences = NULL WHERE episode = ?", (oldest,))


_OLDEST = """
SELECT min(number) FROM (
    SELECT min(episode) AS number FROM details
    UNION ALL SELECT min(episode) FROM trained WHERE sequences IS NOT NULL
)
"""
"""The number of the oldest episode of which there are calls or tokens."""


def _stored_bytes(run: sqlite3.Connection) -> int:
    """Of all calls and tokens."""
    (details,) = run.execute("SELECT coalesce(sum(length(detail)), 0) FROM details").fetchone()
    query = "SELECT coalesce(sum(length(sequences)), 0) FROM trained WHERE sequences IS NOT NULL"
    (sequences,) = run.execute(query).fetchone()
    return details + sequences


def _numbered_names(run: sqlite3.Connection) -> dict[str, int]:
    return dict(run.execute("SELECT name, number FROM names").fetchall())


def _columns(episode: RecordedEpisode) -> dict[str, object]:
    """The columns of `episodes`, but for the sample."""
    calls = episode.detail.calls
    versions = [version for call in calls for version in call.policy_versions]
    return {
        "uuid": episode.uuid,
        "type": episode.episode_type,
        "step": episode.step,
        "label": episode.label,
        "group_id": episode.group_id,
        "status": episode.status,
        "reward": episode.reward,
        "is_success": episode.is_success,
        "attempt": episode.attempt,
        "client": episode.client_uuid,
        "started": min((call.created for call in calls if call.created), default=0),
        "ended": episode.ended,
        "calls": len(calls),
        "prompt_tokens": sum(len(call.new_prompt) for call in calls) // 4,
        "sampled_tokens": sum(len(call.sampled) for call in calls) // 4,
        "truncated": sum(call.stop_reason == "length" for call in calls),
        "first_version": min(versions, default=None),
        "last_version": max(versions, default=None),
        "preview": _preview(episode),
        "figures": json.dumps(_figures(episode.detail)),
    }


def _figures(detail: EpisodeDetail) -> dict[str, float]:
    """The scores and the episode's own metrics by name, for filters."""
    scores = detail.metadata.get("scores")
    found = {f"score/{name}": value for name, value in scores.items()} if isinstance(scores, dict) else {}
    found |= detail.log_metrics
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _preview(episode: RecordedEpisode) -> str:
    """The last reply, or why the episode failed."""
    detail = episode.detail
    if episode.status != "accepted" and detail.failures:
        last = detail.failures[-1]
        return _storable(f"{last.get('kind')}: {last.get('message')}"[:PREVIEW_CHARS])
    words = reply_text(detail.calls[-1]).split() if detail.calls else []
    return _storable(" ".join(words)[:PREVIEW_CHARS])


def reply_text(call: Call) -> str:
    """What a call answered, tools that it called included."""
    reply = json.loads(call.reply) or {}
    return " ".join(_texts(reply))


def _texts(value: Any) -> Iterator[str]:
    """Strings inside a message, but for what only names its parts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in ("role", "id", "type", "tool_call_id"):
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _text_of(episode: RecordedEpisode) -> str:
    """What the search finds an episode by."""
    parts = [episode.uuid, episode.group_id, episode.task, episode.client_uuid]
    for call in episode.detail.calls:
        parts += [*_texts(json.loads(call.messages)), reply_text(call)]
    parts += [str(failure.get("message")) for failure in episode.detail.failures]
    return _storable("\n".join(parts)[:MAX_INDEXED_CHARS])


def _storable(text: str) -> str:
    """The text without lone surrogates, which are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


def checkpoint(path: Path) -> None:
    """Fold the write-ahead log into the file, so that it can be copied by itself. Raises sqlite3.Error."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
