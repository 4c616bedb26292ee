"""`EpisodeLine`: an episode in a list, and the filters of such lists.

Invariant: a list is read from its newest end in pages, by an index or for at most `SCAN_S` seconds, so that
it takes the same time whatever the run's size.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, Field

from tinkerscript.record.reader import Record

MAX_LINES = 200
FIRST_ROWS, SCAN_ROWS = 64, 2000
SCAN_S = 1.0
"""How long a filter looks for what it lets pass, until it hands out what it has found."""

Show = Literal["all", "accepted", "failed", "truncated", "trained", "untrained"]

COLUMNS = """
episodes.number, uuid, type, step, label, group_id, sample, status, reward, is_success, attempt, client,
started, ended, calls, prompt_tokens, sampled_tokens, truncated, first_version, last_version, preview,
figures,
(SELECT advantage FROM trained WHERE episode = episodes.number ORDER BY step LIMIT 1) AS advantage,
(SELECT outcome FROM trained WHERE episode = episodes.number ORDER BY step LIMIT 1) AS outcome,
(SELECT resume FROM undone WHERE episode = episodes.number) AS undone
"""


class EpisodeLine(BaseModel):
    """One episode."""

    number: int = Field(description="Place in the order in which episodes ended, from 1.")
    uuid: str
    type: Literal["train", "eval"]
    step: int = Field(description="The training step that it is for, or that the evaluation follows.")
    label: str = Field(description="Of an evaluation: before, step-5, after.")
    group_id: str
    sample: int | None = Field(description="Number of its sample; null for a client's own.")
    status: Literal["accepted", "failed", "cancelled"]
    reward: float | None
    advantage: float | None
    outcome: str | None = Field(
        description="What training did with it: trained, same_reward, group_too_small, stale, misaligned, "
        "stopped (its step, by misalignment), nothing_to_train; null: not yet, or an evaluation."
    )
    is_success: bool | None
    attempt: int
    client: str
    started: int = Field(description="Unix time of the first model call in seconds; 0: unknown.")
    ended: float = Field(description="Unix time in seconds.")
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    truncated: int = Field(description="Calls that the token limit cut off.")
    first_version: int | None = Field(description="The oldest policy version that sampled any of it.")
    last_version: int | None
    undone: int | None = Field(
        description="The restart of the trainer that took it back: its step or evaluation was repeated "
        "without it; null: it counts."
    )
    preview: str = Field(description="The beginning of the last reply, or why the episode failed.")


class EpisodePage(BaseModel):
    """Some episodes, newest first."""

    episodes: list[EpisodeLine]
    next: int | None = Field(description="`before` of the following page; null: there are no more.")


def line(row: sqlite3.Row) -> EpisodeLine:
    """The line of a row with `COLUMNS`."""
    return EpisodeLine.model_validate(dict(row))


def lines(record: Record, where: str, parameters: tuple[object, ...], *, limit: int) -> list[EpisodeLine]:
    """The lines of a query that an index answers."""
    query = f"SELECT {COLUMNS} FROM episodes WHERE {where} LIMIT {limit}"
    return [line(row) for row in record.rows(query, parameters)]


def newest(record: Record, *, show: str = "all", before: int | None = None, limit: int = 50) -> EpisodePage:
    """The newest episodes that `show` lets pass, with numbers below `before`."""
    return EpisodePage(**page_of(scanned(record, before=before), lambda row: _passes(row, show), limit))


def page_of(rows: Iterable[sqlite3.Row], passes: Callable[[sqlite3.Row], bool], limit: int) -> dict[str, Any]:
    """`episodes`, at most `limit` of `rows` that pass, and `next`: where to go on after that, or after
    `SCAN_S` seconds."""
    ends = time.monotonic() + SCAN_S
    found: list[EpisodeLine] = []
    for row in rows:
        if passes(row):
            found.append(line(row))
        if len(found) >= min(limit, MAX_LINES) or time.monotonic() > ends:
            return {"episodes": found, "next": row["number"]}
    return {"episodes": found, "next": None}


def _passes(row: sqlite3.Row, show: str) -> bool:
    match show:
        case "accepted":
            return row["status"] == "accepted"
        case "failed":
            return row["status"] != "accepted"
        case "truncated":
            return row["truncated"] > 0
        case "trained":
            return row["outcome"] == "trained"
        case "untrained":
            return row["outcome"] not in (None, "trained")
        case _:
            return True


def scanned(record: Record, *, before: int | None = None, first: int = 1) -> Iterator[sqlite3.Row]:
    """Episodes from the newest on down to number `first`: few rows at first, as most need no more."""
    query = f"SELECT {COLUMNS} FROM episodes WHERE number BETWEEN ? AND ? - 1 ORDER BY number DESC LIMIT ?"
    last, count = before if before is not None else 2**62, FIRST_ROWS
    while rows := record.rows(query, (first, last, count)):
        yield from rows
        last, count = rows[-1]["number"], SCAN_ROWS


def figures_of(row: sqlite3.Row) -> dict[str, float]:
    """The episode's scores and metrics by name."""
    found: Any = json.loads(row["figures"])
    return found
