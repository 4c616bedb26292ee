"""What a chaos run leaves: the files that its processes write, and its ledger.

Every line is one JSON object, handed to the operating system in one write before anything follows from it: a
killed process leaves whole lines, and at most one cut short, which readers leave out.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkerscript.ledger.compression import DICTIONARIES, Dictionaries
from tinkerscript.ledger.ledger import decoded
from tinkerscript.ledger.postgres import unescaped

if TYPE_CHECKING:
    from postgres_server import PostgresServer

ORACLE = "oracle.jsonl"
"""The fake sampler's: `begin` and `end` (with nonce and ids) of every sample, or `cancelled`."""

TRAINER = "trainer.jsonl"
"""The fake trainer's: what it planned, every outcome that reached it, every step that it commits."""

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


Found = list[dict[str, Any]]

LAST = "SELECT max(attempt) FROM {s}attempts WHERE episode = sequence"
"""Of an episode in a query."""

Query = Callable[[str], list[tuple[Any, ...]]]
"""Asks a ledger, with `{s}` before each table's name."""


def query_file(path: Path, sql: str) -> list[tuple[Any, ...]]:
    """What a ledger in SQLite answers."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
        return connection.execute(sql.replace("{s}", "")).fetchall()


def query_database(database: PostgresServer, sql: str) -> list[tuple[Any, ...]]:
    """What a ledger in PostgreSQL answers."""
    rows = database.query(sql.replace("{s}", f"{SCHEMA}."))
    return [tuple(unescaped(each) if isinstance(each, str) else each for each in row) for row in rows]


@dataclass(frozen=True, slots=True)
class OpenEpisode:
    """One of the trainer's episodes that is claimed, or has ended and is not consumed."""

    state: str
    client: str


def open_episodes(query: Query) -> dict[str, OpenEpisode]:
    """By uuid."""
    client = f"SELECT client FROM {{s}}attempts WHERE episode = sequence AND attempt = ({LAST})"
    rows = query(
        f"SELECT uuid, state, ({client}) FROM {{s}}episodes "
        "WHERE pool = '' AND consumed = 0 AND state IN ('claimed', 'ended')"
    )
    return {uuid: OpenEpisode(state, client) for uuid, state, client in rows}


def unsettled(query: Query) -> list[tuple[str, str]]:
    """The trainer's episodes that have not ended, or whose outcome nothing has used: uuid and state."""
    return query("SELECT uuid, state FROM {s}episodes WHERE pool = '' AND consumed = 0")


@dataclass(frozen=True)
class LedgerLines:
    """What the checker looks at in a ledger, each row as a line."""

    episodes: Found
    """Each with its failures' kinds; with the claim, the result and the calls that count, if it ended."""

    trained: Found
    steps: Found
    publications: Found
    """In the order of time."""

    other_claims: Found = field(default_factory=Found)
    """Those that do not count and have calls."""


def read_ledger(query: Query) -> LedgerLines:
    """All of a ledger that nobody writes any more."""
    failures: dict[int, list[str]] = defaultdict(list)
    clients: dict[tuple[int, int], str] = {}
    for sequence, attempt, client, failure in query(
        "SELECT episode, attempt, client, failure FROM {s}attempts ORDER BY attempt = 0, attempt"
    ):
        clients[sequence, attempt] = client
        if failure is not None:
            failures[sequence].append(json.loads(failure)["kind"])
    dictionaries = Dictionaries(lambda: [content for _, content in query(DICTIONARIES)])
    calls: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    for sequence, attempt, call in query("SELECT episode, attempt, call FROM {s}calls ORDER BY number"):
        calls[sequence, attempt].append(call)
    episodes = Found()
    rows = query(
        "SELECT sequence, uuid, pool, step, state, consumed, undone, reward, attempt, client, "
        "policy_version, result FROM {s}episodes "
        "LEFT JOIN {s}attempts AS a ON a.episode = sequence AND attempt > 0 "
        f"AND attempt = ({LAST}) LEFT JOIN {{s}}results AS r ON r.episode = sequence ORDER BY sequence"
    )
    for sequence, uuid, pool, step, state, consumed, undone, reward, attempt, client, version, result in rows:
        line = {"episode": uuid, "pool": pool, "step": step, "state": state, "consumed": bool(consumed)}
        line |= {"undone": undone, "failures": failures[sequence]}
        if state == "ended":
            line |= {"attempt": attempt, "client": client, "reward": reward, "claimed_version": version}
            line["metadata"] = json.loads(result)["metadata"] if result else None
            line["calls"] = _call_lines(calls.pop((sequence, attempt), []), dictionaries)
        episodes.append(line)
    names = {sequence: uuid for sequence, uuid, *_ in rows}

    def lines(sql: str, *fields: str) -> Found:
        return [dict(zip(fields, row, strict=True)) for row in query(sql)]

    trained = lines(
        "SELECT uuid, t.step, role, outcome, t.undone "
        "FROM {s}trained AS t JOIN {s}episodes ON sequence = episode",
        *("episode", "step", "role", "outcome", "undone"),
    )
    published = "SELECT policy_version, step, undone FROM {s}publications ORDER BY time"
    return LedgerLines(
        episodes=episodes,
        trained=trained,
        steps=lines("SELECT step, undone FROM {s}steps", "step", "undone"),
        publications=lines(published, "policy_version", "step", "undone"),
        other_claims=[
            {
                "episode": names[sequence],
                "attempt": attempt,
                "client": clients[sequence, attempt],
                "calls": _call_lines(found, dictionaries),
            }
            for (sequence, attempt), found in calls.items()
        ],
    )


def _call_lines(calls: Iterable[bytes], dictionaries: Dictionaries) -> Found:
    return [
        {
            "call": call.call_id,
            "parent": call.parent_id,
            "new_prompt": call.new_prompt.hex(),
            "sampled": call.sampled.hex(),
            "logprobs": call.logprobs.hex(),
            "version": call.policy_version,
            "spans": [list(span) for span in call.spans],
            "messages": call.messages,
        }
        for call in decoded(((each,) for each in calls), dictionaries)
    ]
