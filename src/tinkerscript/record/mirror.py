"""`Mirror`: a copy of the record of a trainer elsewhere, written from what it sends.

Invariants: nothing that a trainer sends reaches another file, is run as SQL, or is written before it has been
read as what it claims to be; the file stays within its limit; a row that comes twice is there once. A record
that is not a mirror is never written.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from tinkerscript.errors import ConfigError
from tinkerscript.record.entries import EpisodeDetail, TrainedSequence
from tinkerscript.record.episode_row import searched_text
from tinkerscript.record.rows import (
    Marks,
    RowBatch,
    TrainedRow,
    read_marks,
    unpack_batch,
    unpack_bounded,
)
from tinkerscript.record.schema import RECORD_FILE, open_for_writing, take_back
from tinkerscript.record.storage_limit import StorageLimit

MAX_UNPACKED_BYTES = 256 * 2**20
"""Of an episode's calls, or of its tokens in one step."""

SPARE_MB = 1024
"""What a file may take besides twice the limit on calls and tokens: rows, samples, and the index of words."""

_INSERTED = ("names", "metrics", "steps", "findings", "notes", "samples", "transcripts", "undone", "trained")
"""Tables whose rows are written as they come."""


class Mirror:
    """The mirror in a folder. For one thread; use as a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        identity: str,
        limit_mb: int,
        model: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens or makes the file. `identity`: the session of the record's first writer; `limit_mb`: of calls
        and tokens, 0: no limit; `model`: where this machine has the run's model.

        Raises ConfigError if the folder has a record that is no mirror, or the mirror of another one.
        """
        self._clock = clock
        self._limit = StorageLimit(limit_mb)
        self._run = open_for_writing(folder / RECORD_FILE)
        try:
            _check_owner(self._run, folder, identity)
            if limit_mb:
                (page_size,) = self._run.execute("PRAGMA page_size").fetchone()
                pages = (2 * limit_mb + SPARE_MB) * 2**20 // page_size
                self._run.execute(f"PRAGMA max_page_count = {pages}")
            self._run.execute("DELETE FROM mirror")
            self._run.execute("INSERT INTO mirror VALUES (?, ?)", (clock(), model))
            self._limit.count(self._run)
        except BaseException:
            self._run.close()
            raise

    def marks(self) -> Marks:
        """What is there."""
        return read_marks(self._run)

    def write(self, data: bytes) -> Marks:
        """Write a packed batch, or nothing of it; returns what is there then.

        Raises ValueError for a batch that a record cannot have, and sqlite3.Error if it cannot be written.
        """
        batch = unpack_batch(data)
        _check(batch)
        words = self._words(batch)
        self._run.execute("BEGIN IMMEDIATE")
        try:
            self._write(batch, words)
            self._limit.keep(self._run)
            self._run.execute("UPDATE mirror SET heard = ?", (self._clock(),))
            self._run.execute("COMMIT")
        except (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError, OverflowError) as error:
            raise ValueError(f"rows that a record cannot have: {error}") from error
        finally:
            if self._run.in_transaction:
                self._run.execute("ROLLBACK")
                self._limit.count(self._run)
        return self.marks()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()

    def _words(self, batch: RowBatch) -> dict[int, str]:
        """What the search finds the batch's episodes by, by their numbers. Raises ValueError."""
        tasks = {row.number: row.task for row in batch.samples}
        details = {row.episode: row.detail for row in batch.details}
        found: dict[int, str] = {}
        for row in batch.episodes:
            task = tasks.get(row.sample or 0) or self._task(row.sample)
            data, detail = details.get(row.number), EpisodeDetail()
            if data is not None:
                detail = unpack_bounded(data, EpisodeDetail, MAX_UNPACKED_BYTES)
            try:
                found[row.number] = searched_text(row.uuid, row.group_id, task, row.client, detail=detail)
            except (ValueError, RecursionError, TypeError, AttributeError) as error:
                raise ValueError(f"the calls of episode {row.uuid!r} cannot be read: {error}") from error
        return found

    def _task(self, sample: int | None) -> str:
        found = self._run.execute("SELECT task FROM samples WHERE number = ?", (sample,)).fetchone()
        return found[0] if found else ""

    def _write(self, batch: RowBatch, words: dict[int, str]) -> None:
        self._insert("run", batch.facts.items())
        for resume in batch.resumes:
            known = self._run.execute("SELECT 1 FROM resumes WHERE number = ?", (resume.number,)).fetchone()
            if known is None:
                take_back(self._run, resume.step)
                self._limit.count(self._run)
            self._insert("resumes", [resume])
        columns = "(rowid, label, step, time, policy_version, score, accepted, failed)"
        self._insert(f"evaluations {columns}", batch.evaluations)
        self._add_episodes(batch, words)
        for row in batch.trained:
            self._limit.add(len(row.sequences or b"") - self._stored(row))
        self._limit.add(sum(len(row.transcript) for row in batch.transcripts))
        for table in _INSERTED:
            self._insert(table, getattr(batch, table))

    def _insert(self, table: str, rows: Iterable[tuple[object, ...]]) -> None:
        rows = list(rows)
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            self._run.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)

    def _add_episodes(self, batch: RowBatch, words: dict[int, str]) -> None:
        """Those that are not there yet, with their calls and words."""
        details = {row.episode: row for row in batch.details}
        for row in batch.episodes:
            marks = ", ".join("?" * len(row))
            added = self._run.execute(f"INSERT OR IGNORE INTO episodes VALUES ({marks})", row)
            if not added.rowcount:
                continue
            self._run.execute(
                "INSERT INTO words (rowid, body) VALUES (?, ?)", (row.number, words[row.number])
            )
            if (detail := details.get(row.number)) is not None:
                self._insert("details", [detail])
                self._limit.add(len(detail.detail))

    def _stored(self, row: TrainedRow) -> int:
        query = "SELECT length(sequences) FROM trained WHERE episode = ? AND step = ?"
        found = self._run.execute(query, (row.episode, row.step)).fetchone()
        return (found and found[0]) or 0


def _check_owner(run: sqlite3.Connection, folder: Path, identity: str) -> None:
    """Raises ConfigError unless the record is empty, or a mirror of the one with this identity."""
    first = run.execute("SELECT session FROM resumes WHERE number = 1").fetchone()
    if run.execute("SELECT 1 FROM mirror").fetchone() is None:
        if first is None and not run.execute("SELECT 1 FROM run").fetchone():
            return
        whose = (
            "an earlier copy of this run's record" if first == (identity,) else "the record of another run"
        )
    elif first is None or first == (identity,):
        return
    else:
        whose = "the mirror of another run's record"
    raise ConfigError(
        f"{folder / RECORD_FILE} on the server's machine is {whose}; move it away to see this run there"
    )


class _Phase(msgspec.Struct):
    label: str
    done: int
    total: int
    time: float


class _Facts(msgspec.Struct):
    """Those of `run` that a page reads, as it reads them. Others are only shown."""

    state: Literal["running", "finished", "stopped", "failed"] = "running"
    process: tuple[str, int, int] = ("", 0, 0)
    failure: str = ""
    method: str = ""
    phase: _Phase | None = None
    waiting_for: str = ""
    waiting_since: float = 0.0
    name: str = ""
    model: str = ""
    tasks: list[str] = []
    recording: str = ""
    config: dict[str, Any] = {}
    step: int = 0
    steps: int = 0
    began: float = 0.0
    last_step: float = 0.0
    server_url: str = ""


def _check(batch: RowBatch) -> None:
    """Raises ValueError for contents that are not what they have to be."""
    try:
        facts = (f"{json.dumps(name)}: {value}" for name, value in batch.facts.items())
        msgspec.json.decode(f"{{{', '.join(facts)}}}", type=_Facts)
        for sample in batch.samples:
            msgspec.json.decode(sample.sample, type=dict[str, object])
        for episode in batch.episodes:
            msgspec.json.decode(episode.figures, type=dict[str, float])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"contents that a record cannot have: {error}") from error
    for row in batch.trained:
        if row.sequences is not None:
            unpack_bounded(row.sequences, list[TrainedSequence], MAX_UNPACKED_BYTES)
