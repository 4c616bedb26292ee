"""`SearchIndex` finds a run's episodes by words, with SQLite's full-text search.

Searches build `search.sqlite` next to the ledger, newest episodes first, or a temporary file in a read-only
folder. We write through no link, which a foreign folder may have.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.rollouts.call import Call

SEARCH_FILE = "search.sqlite"

INDEX_S = 0.25

CHUNK = 200

MAX_INDEXED_CHARS = 65_536

BAD_CALLS = NotRecordedError, ValueError, RecursionError
"""Errors of calls that no gateway wrote; lists and searches skip them."""

_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS spans (first INTEGER NOT NULL, last INTEGER NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(body, content='');
COMMIT;
"""

_TO_INDEX = """
SELECT end_number, sequence, uuid, group_id, sample FROM episodes
    WHERE end_number BETWEEN ? AND ? ORDER BY end_number DESC LIMIT ?
"""

_MATCHES = """
SELECT rowid FROM words WHERE words MATCH ? AND rowid BETWEEN ? AND ? ORDER BY rowid DESC LIMIT ?
"""

_KNOWN = "SELECT rowid FROM words WHERE rowid BETWEEN ? AND ?"
_SPANS = "SELECT first, last FROM spans"


class SearchIndex:
    """Thread-safe."""

    _known: ClassVar[dict[Path, SearchIndex]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of(cls, ledger: LedgerReader) -> SearchIndex:
        with cls._lock:
            if ledger.folder not in cls._known:
                cls._known[ledger.folder] = cls(ledger)
            return cls._known[ledger.folder]

    def __init__(self, ledger: LedgerReader) -> None:
        self._ledger = ledger
        self._at_work = threading.Lock()
        path = ledger.folder / SEARCH_FILE
        try:
            # SQLite follows no links for its extra files.
            if path.is_symlink() or not os.access(ledger.folder, os.W_OK):
                raise sqlite3.OperationalError("not writable")
            self._connection = _opened(path)
        except sqlite3.Error:
            self._temporary = tempfile.TemporaryDirectory(prefix="tinkerscript-search-")
            self._connection = _opened(Path(self._temporary.name) / SEARCH_FILE)

    @classmethod
    def forget(cls, folder: Path) -> None:
        with cls._lock:
            cls._known.pop(folder, None)

    def extend(self, first: int, last: int) -> int:
        """Index some episodes, from `last` down. Return the number from which all are indexed."""
        with self._at_work, _readable_errors("the search index"):
            ends = time.monotonic() + INDEX_S
            newest = int(self._ledger.number("SELECT coalesce(max(end_number), 0) FROM episodes") or 0)
            last = min(last, newest)
            low = self._indexed_from(last)
            if low <= last:
                return max(low, first)
            while low > first and time.monotonic() < ends:
                self._index(first, low - 1)
                low = self._indexed_from(low - 1)
            return max(low, first)

    def find(self, words: list[str], first: int, last: int, limit: int) -> list[int]:
        match = " ".join(f'"{word.replace(chr(34), chr(34) * 2)}"*' for word in words)
        with self._at_work, _readable_errors(f"the search {match}"):
            return [number for (number,) in self._connection.execute(_MATCHES, (match, first, last, limit))]

    def _spans(self) -> list[tuple[int, int]]:
        return self._connection.execute(_SPANS).fetchall()

    def _indexed_from(self, last: int) -> int:
        return next((low for low, high in self._spans() if low <= last <= high), last + 1)

    def _index(self, first: int, last: int) -> None:
        found = self._ledger.rows(_TO_INDEX, (first, last, CHUNK))
        done = found[-1][0] if len(found) == CHUNK else first
        texts = [(number, self._text(sequence, names)) for number, sequence, *names in found]
        run = self._connection
        run.execute("BEGIN IMMEDIATE")
        try:
            # Another page may have indexed some.
            known = {number for (number,) in run.execute(_KNOWN, (done, last))}
            fresh = [each for each in texts if each[0] not in known]
            run.executemany("INSERT INTO words (rowid, body) VALUES (?, ?)", fresh)
            touching = [span for span in self._spans() if span[0] <= last + 1 and span[1] >= done - 1]
            run.executemany("DELETE FROM spans WHERE first = ? AND last = ?", touching)
            ends = [done, last, *(end for span in touching for end in span)]
            run.execute("INSERT INTO spans VALUES (?, ?)", (min(ends), max(ends)))
            run.execute("COMMIT")
        finally:
            if run.in_transaction:
                run.execute("ROLLBACK")

    def _text(self, sequence: int, names: list[Any]) -> str:
        uuid, group_id, sample = names
        row = self._ledger.row("SELECT payload FROM samples WHERE digest = ?", (sample,))
        payload: Any = json.loads(bytes(row[0])) if row is not None else {}
        parts = [uuid, group_id, str(payload.get("task", ""))]
        query = "SELECT attempt, client, failure FROM attempts WHERE episode = ? ORDER BY attempt"
        attempts = self._ledger.rows(query, (sequence,))
        for _, client, failure in attempts:
            parts.append(client)
            if failure is not None:
                parts.append(str(json.loads(failure).get("message")))
        with suppress(*BAD_CALLS):
            for call in self._ledger.calls(sequence, attempts[-1][0] if attempts else 0):
                parts += [*_texts(json.loads(call.messages or "[]")), reply_text(call)]
        return storable("\n".join(parts)[:MAX_INDEXED_CHARS])


@contextmanager
def _readable_errors(what: str) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise NotRecordedError(f"{what} cannot be used: {error}") from error


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = OFF")  # We can rebuild the index.
        connection.executescript(_SCHEMA)
        connection.execute(_MATCHES, ("a", 0, 0, 1))
        connection.execute(_SPANS)
    except BaseException:
        connection.close()
        raise
    return connection


def reply_text(call: Call) -> str:
    return " ".join(_texts(json.loads(call.reply) or {}))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            if key not in ("role", "id", "type", "tool_call_id"):
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _texts(item)


def storable(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
