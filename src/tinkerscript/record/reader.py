"""`Record`: a run's record for reading, by any number of threads, while the run goes on.

Invariant: it cannot write, and every query is bounded: by an index, a limit, or a time.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.record.entries import EpisodeDetail, TrainedSequence, unpacked
from tinkerscript.record.schema import RECORD_FILE, open_for_reading

T = TypeVar("T")

Parameters = Sequence[object] | Mapping[str, object]


class Record:
    """The record in a run's folder."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has none, or one of another version."""
        self.folder = folder
        self._path = folder / RECORD_FILE
        self._of_thread = threading.local()
        self._connection()

    def _connection(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._of_thread, "connection", None)
        if found is None:
            found = self._of_thread.connection = open_for_reading(self._path)
        return found

    def rows(self, query: str, parameters: Parameters = ()) -> list[sqlite3.Row]:
        return self._connection().execute(query, cast("Any", parameters)).fetchall()

    def row(self, query: str, parameters: Parameters = ()) -> sqlite3.Row | None:
        return self._connection().execute(query, cast("Any", parameters)).fetchone()

    def number(self, query: str, parameters: Parameters = ()) -> float | None:
        """The only value of the only row."""
        found = self.row(query, parameters)
        return None if found is None else found[0]

    def facts(self) -> dict[str, Any]:
        """What `RecordWriter.status` was told last."""
        return {name: json.loads(value) for name, value in self.rows("SELECT name, value FROM run")}

    def model(self) -> str:
        """The folder or name of the model."""
        return str(self.facts().get("model", ""))

    def change(self) -> int:
        """A number that differs once the record has changed. For one thread."""
        return int(self.number("PRAGMA data_version") or 0)

    def detail(self, number: int) -> EpisodeDetail | None:
        """The calls of the episode with this number; None if they are not recorded."""
        found = self.row("SELECT detail FROM details WHERE episode = ?", (number,))
        return None if found is None else _unpacked(found[0], EpisodeDetail)

    def transcribed(self, number: int) -> list[int]:
        """The attempts of the episode with this number whose transcripts are recorded."""
        query = "SELECT attempt FROM transcripts WHERE episode = ? ORDER BY attempt"
        return [attempt for (attempt,) in self.rows(query, (number,))]

    def transcript(self, number: int, attempt: int) -> bytes | None:
        """The transcript of one of them, as its program sent it: it may be anything."""
        query = "SELECT transcript FROM transcripts WHERE episode = ? AND attempt = ?"
        found = self.row(query, (number, attempt))
        return None if found is None else found[0]

    def sequences(self, number: int) -> dict[int, list[TrainedSequence]]:
        """Step -> what it did with the sequences of the episode with this number."""
        query = "SELECT step, sequences FROM trained WHERE episode = ? AND sequences IS NOT NULL"
        return {step: _unpacked(data, list[TrainedSequence]) for step, data in self.rows(query, (number,))}

    def close(self) -> None:
        """Close this thread's connection."""
        self._connection().close()
        del self._of_thread.connection


def _unpacked(data: bytes, kind: type[T]) -> T:
    """Raises NotRecordedError for what no recorder packed, such as a few bytes that stand for gigabytes."""
    try:
        return unpacked(data, kind)
    except ValueError as error:
        raise NotRecordedError(f"the record holds something else: {error}") from error


def find_runs(root: Path) -> dict[str, Path]:
    """Name -> folder of the runs in `root`, or of the one that it is.

    Raises ConfigError if there are none.
    """
    if (root / RECORD_FILE).is_file():
        root = root.resolve()
        return {root.name: root}
    found = [path.parent for path in sorted(root.glob(f"*/{RECORD_FILE}")) if not path.parent.is_symlink()]
    if not found:
        raise ConfigError(
            f"{root} is not the folder of a recorded run, and has none in it (no {RECORD_FILE})"
        )
    return {path.name: path for path in found}
