"""The files that a chaos run leaves, and how its processes write them.

Every line is one JSON object, handed to the operating system in one write before anything follows from it: a
killed process leaves whole lines, and at most one cut short, which readers leave out.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postgres_server import PostgresServer

ORACLE = "oracle.jsonl"
"""The fake sampler's: `begin` and `end` (with nonce and ids) of every sample, or `cancelled`."""

JOURNAL = "trainer_journal.jsonl"
"""The fake trainer's: what it registered, and every outcome before it is acknowledged."""

WORKERS = "workers.jsonl"
"""The workers': every result that the server has confirmed to its client."""

HOSTILE = "hostile.jsonl"
"""The hostile clients': what they claimed, registered, failed and handed in, and the reply to each attack."""

SCHEMA = "chaos"
"""Of the run in PostgreSQL."""

KILLS = "kills.jsonl"
"""The conductor's: every kill, with what was in which state."""


class Lines:
    """An append-only file of JSON lines that several processes may write."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, **line: Any) -> None:
        data = (json.dumps(line) + "\n").encode()
        assert os.write(self._file, data) == len(data)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    return list(_whole_lines(path.read_bytes())) if path.exists() else []


def _whole_lines(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n")[:-1]:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # Cut short by a kill; the next process began behind it.


class Tail:
    """Follows a file of lines that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The lines since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return list(_whole_lines(data[:whole]))


@dataclass(frozen=True, slots=True)
class Row:
    """One episode in the server's file."""

    state: str
    clients: list[str]
    acknowledged: bool


RowReader = Callable[..., dict[str, Row]]
"""`read_rows` of one store: takes states."""


def read_rows(path: Path, *states: str) -> dict[str, Row]:
    """The trainer's episodes in the server's file, by uuid; of all states if none is named."""
    query = "SELECT uuid, state, claimants, acknowledged FROM episodes WHERE pool = ''"
    if states:
        query += f" AND state IN ({','.join('?' * len(states))})"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
        rows = connection.execute(query, states).fetchall()
    return {uuid: Row(state, json.loads(clients), bool(done)) for uuid, state, clients, done in rows}


def rows_in_database(database: PostgresServer, *states: str) -> dict[str, Row]:
    """The same in PostgreSQL."""
    query = f"SELECT uuid, state, claimants::text, acknowledged FROM {SCHEMA}.episodes WHERE pool = ''"
    if states:
        query += " AND state = ANY(%s)"
    rows = database.query(query, *([list(states)] if states else []))
    return {uuid: Row(state, json.loads(clients), done) for uuid, state, clients, done in rows}
