"""`EpisodeLine`: an episode in a list; the filters of such lists, and the search.

    sorry cannot            episodes with both words
    "the answer is"         with this phrase
    reward>0.5 step=12      conditions on columns
    score/exact=0           on scores, and on metrics that the program logged
    client:worker-3 7f3a    ids and names, by their beginning

Invariant: a list is read from its newest end in pages, by an index or for at most `SCAN_S` seconds, so that
it takes the same time whatever the run's size. A search says where to go on.
"""

from __future__ import annotations

import json
import operator
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.record.reader import Record

MAX_LINES = 200
FIRST_ROWS, SCAN_ROWS = 64, 2000
SCAN_S = 1.0
"""How long a filter looks for what it lets pass, until it hands out what it has found."""

Show = Literal["all", "accepted", "failed", "truncated", "trained", "untrained"]

EPISODE_COLUMNS = """
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
    """The line of a row with `EPISODE_COLUMNS`."""
    return EpisodeLine.model_validate(dict(row))


def lines(record: Record, where: str, parameters: tuple[object, ...], *, limit: int) -> list[EpisodeLine]:
    """The lines of a query that an index answers."""
    query = f"SELECT {EPISODE_COLUMNS} FROM episodes WHERE {where} LIMIT {limit}"
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
    rows_of = f"SELECT {EPISODE_COLUMNS} FROM episodes"
    query = f"{rows_of} WHERE number BETWEEN ? AND ? - 1 ORDER BY number DESC LIMIT ?"
    last, count = before if before is not None else 2**62, FIRST_ROWS
    while rows := record.rows(query, (first, last, count)):
        yield from rows
        last, count = rows[-1]["number"], SCAN_ROWS


def figures_of(row: sqlite3.Row) -> dict[str, float]:
    """The episode's scores and metrics by name."""
    found: Any = json.loads(row["figures"])
    return found


MAX_QUERY_CHARS = 500
TEXT_COLUMNS = ("uuid", "type", "label", "group_id", "status", "client", "outcome")
NUMBER_COLUMNS = (
    *("step", "reward", "advantage", "attempt", "calls", "prompt_tokens", "sampled_tokens", "truncated"),
    *("sample", "first_version", "last_version", "is_success", "undone"),
)

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    ":": operator.eq,
}

_TERM = re.compile(r'"([^"]*)"|(\S+)')
_CONDITION = re.compile(r"([A-Za-z_][\w/.\- ]*?)(<=|>=|!=|<|>|=|:)(.+)")


class SearchPage(BaseModel):
    """Episodes that were found, newest first."""

    episodes: list[EpisodeLine]
    next: int | None = Field(description="`before` of the following page; null: that was all.")


@dataclass(frozen=True, slots=True)
class Query:
    """What to search for."""

    words: list[str]
    """Words, or phrases."""

    conditions: list[tuple[str, str, str]]
    """(name, operator, value)."""


def parse(text: str) -> Query:
    """Raises NotRecordedError for a condition that cannot be read."""
    words: list[str] = []
    conditions: list[tuple[str, str, str]] = []
    for match in _TERM.finditer(text[:MAX_QUERY_CHARS]):
        phrase, word = match[1], match[2]
        found = _CONDITION.fullmatch(word) if word else None
        if found is None:
            words.append(phrase if phrase is not None else word)
            continue
        name, sign, value = found[1], found[2], found[3]
        if name not in TEXT_COLUMNS and not _is_number(value):
            if sign in ("=", ":"):  # A word such as `https://...`.
                words.append(word)
                continue
            raise NotRecordedError(f"{word}: {value!r} is not a number")
        conditions.append((name, sign, value))
    return Query([word for word in words if word], conditions)


def search(record: Record, text: str, *, before: int | None = None, limit: int = 50) -> SearchPage:
    """The newest episodes that match. Raises NotRecordedError for a query that cannot be read."""
    query = parse(text)
    first, last = _span(record, query.conditions)
    before = min(before or 2**62, last + 1)
    rows = (
        _with_words(record, query.words, before, first)
        if query.words
        else scanned(record, before=before, first=first)
    )

    def holds(row: sqlite3.Row) -> bool:
        return all(_holds(row, *condition) for condition in query.conditions)

    return SearchPage(**page_of(rows, holds, limit))


def _span(record: Record, conditions: list[tuple[str, str, str]]) -> tuple[int, int]:
    """The numbers of the first and the last episode of the steps that are asked for."""
    asked = [(sign.replace(":", "="), float(value)) for name, sign, value in conditions if name == "step"]
    if not asked:
        return 1, 2**62
    where = " AND ".join(f"step {sign} ?" for sign, _ in asked)
    row = record.row(
        f"SELECT min(number), max(number) FROM episodes WHERE {where}", [value for _, value in asked]
    )
    assert row is not None
    return (1, 0) if row[0] is None else (row[0], row[1])


def _with_words(record: Record, words: list[str], before: int, first: int) -> Iterator[sqlite3.Row]:
    """Episodes with all words, newest first; an id may be given by its beginning."""
    match = " ".join(f'"{word.replace(chr(34), chr(34) * 2)}"*' for word in words)
    query = f"""
    SELECT {EPISODE_COLUMNS} FROM episodes WHERE number IN (
        SELECT rowid FROM words WHERE words MATCH ? AND rowid BETWEEN ? AND ? - 1
            ORDER BY rowid DESC LIMIT ?
    ) ORDER BY number DESC
    """
    last, count = before, FIRST_ROWS
    try:
        while rows := record.rows(query, (match, first, last, count)):
            yield from rows
            last, count = rows[-1]["number"], SCAN_ROWS
    except sqlite3.OperationalError as error:
        raise NotRecordedError(f"the search {match} cannot be read: {error}") from error


def _holds(row: sqlite3.Row, name: str, sign: str, value: str) -> bool:
    if name in TEXT_COLUMNS:
        own = str(row[name] or "")
        return (not own.startswith(value)) if sign == "!=" else own.startswith(value)
    number = row[name] if name in NUMBER_COLUMNS else figures_of(row).get(name)
    return number is not None and _OPERATORS[sign](float(number), float(value))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
