"""The search: words of an episode's text, and conditions on its columns, scores and metrics.

    sorry cannot            episodes with both words
    "the answer is"         with this phrase
    reward>0.5 step=12      conditions on columns
    score/exact=0           on scores, and on metrics that the program logged
    client:worker-3 7f3a    ids and names, by their beginning

Invariant: a search takes at most a second or two, whatever the run's size, and says where to go on.
"""

from __future__ import annotations

import operator
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.page.lines import COLUMNS, FIRST_ROWS, SCAN_ROWS, EpisodeLine, figures_of, page_of, scanned
from tinkerscript.record.reader import Record

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
    SELECT {COLUMNS} FROM episodes WHERE number IN (
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
