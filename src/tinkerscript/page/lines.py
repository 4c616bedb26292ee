"""`EpisodeLine`: an episode in a list, the filters of such lists, and the search (docs/page.md#search).

Lists are read in pages, newest episodes first, by an index or for at most `SCAN_S` seconds.
"""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec
from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.page.search_index import BAD_CALLS, SearchIndex, reply_text, storable

MAX_LINES = 200
FIRST_ROWS, SCAN_ROWS = 64, 2000
"""Most lists need no more than the first query's few rows."""

SPAN = 20_000

SCAN_S = 1.0
"""A filtered list stops after this time and returns its results so far."""

PREVIEW_CHARS = 160

QUEUED = "queued_s"

Show = Literal["all", "accepted", "failed", "truncated", "trained", "untrained"]

EPISODE_ROWS = """
SELECT e.end_number AS number, e.sequence, e.uuid, e.episode_type AS type, e.step, e.label, e.group_id,
    e.sample, e.state, e.failure, e.reward, e.is_success, e.ended_at AS ended, e.undone, e.emptied,
    a.attempt, a.client, a.queued_s, t.outcome, t.advantage
FROM episodes AS e
LEFT JOIN attempts AS a ON a.episode = e.sequence
    AND a.attempt = (SELECT max(attempt) FROM attempts WHERE episode = e.sequence)
LEFT JOIN trained AS t ON t.episode = e.sequence AND t.undone = 0 AND t.outcome <> 'evaluated'
    AND t.step = (SELECT min(step) FROM trained WHERE episode = e.sequence AND undone = 0)
    AND t.role = (SELECT min(role) FROM trained WHERE episode = e.sequence AND undone = 0 AND step = t.step)
"""
"""Episodes with their last claim, and how the first step used them, for the policy with the first name."""

_CALLS = """
SELECT episode, attempt, count(*) AS calls, min(nullif(created, 0)) AS started,
    sum(prompt_tokens) AS prompt_tokens, sum(sampled_tokens) AS sampled_tokens,
    sum(CASE WHEN stop_reason = 'length' THEN 1 ELSE 0 END) AS truncated,
    min(policy_version) AS first_version, max(last_version) AS last_version
FROM calls WHERE role = '' AND episode IN ({}) GROUP BY episode, attempt
"""

NO_CALLS: dict[str, Any] = {
    "calls": 0,
    "started": 0,
    "prompt_tokens": 0,
    "sampled_tokens": 0,
    "truncated": 0,
    "first_version": None,
    "last_version": None,
}

_LAST_CALL = """
SELECT call FROM calls WHERE episode = ? AND attempt = ? AND role = '' ORDER BY number DESC LIMIT 1
"""

# Attempt 0 ends an unclaimed episode, so it comes last.
_LAST_FAILURE = """
SELECT failure FROM attempts WHERE episode = ? AND failure IS NOT NULL
    ORDER BY CASE WHEN attempt = 0 THEN 1 ELSE 0 END DESC, attempt DESC LIMIT 1
"""

Episode = dict[str, Any]


class EpisodeLine(BaseModel):
    number: int = Field(description="Place in the order in which episodes ended, from 1.")
    uuid: str
    type: Literal["train", "eval"]
    step: int = Field(
        description="The first training step that could use it, or the step before the evaluation."
    )
    label: str = Field(description="The evaluation: before, step-5, after.")
    group_id: str
    sample: str | None = Field(description="Digest of its sample; null for a chat.")
    status: Literal["accepted", "failed", "cancelled"]
    reward: float | None
    advantage: float | None
    outcome: str | None = Field(
        description="How training used it: trained, same_reward, group_too_small, stale, misaligned, "
        "nothing_to_train, set_aside (misalignment stopped its step), left_out (it failed, or no "
        "batch waited for it), given_up (by a resumption); null if not used yet, or an evaluation."
    )
    is_success: bool | None
    attempt: int
    client: str
    started: int = Field(description="Unix time of the first model call in seconds; 0 if unknown.")
    ended: float = Field(description="Unix time in seconds.")
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    truncated: int = Field(description="Calls cut off by the token limit.")
    first_version: int | None = Field(description="The oldest policy version that sampled from it.")
    last_version: int | None
    undone: int | None = Field(
        description="The start of the trainer that undid it by repeating its step or evaluation; null if it "
        "counts."
    )
    preview: str = Field(description="The beginning of the last reply, or why the episode failed.")


class EpisodePage(BaseModel):
    episodes: list[EpisodeLine]
    next: int | None = Field(description="`before` for the next page; null on the last page.")


def episodes(ledger: LedgerReader, rest: str, parameters: Sequence[Any] = ()) -> list[Episode]:
    """`rest` continues the WHERE clause."""
    found = [
        dict(row)
        for row in ledger.rows(f"{EPISODE_ROWS} WHERE e.end_number IS NOT NULL AND {rest}", parameters)
    ]
    among = ", ".join(str(int(each["sequence"])) for each in found)
    sums = (
        {(row["episode"], row["attempt"]): row for row in ledger.rows(_CALLS.format(among))} if among else {}
    )
    for each in found:
        each["attempt"] = each["attempt"] or 0
        each |= NO_CALLS
        if each["state"] == "ended" and (own := sums.get((each["sequence"], each["attempt"]))) is not None:
            each |= {name: own[name] for name in NO_CALLS}
        each["status"] = status_of(each)
    return found


def status_of(episode: Episode) -> str:
    if episode["state"] == "ended":
        return "accepted"
    return "cancelled" if episode["failure"] == "cancelled" else "failed"


def line(ledger: LedgerReader, episode: Episode) -> EpisodeLine:
    solved, sample = episode["is_success"], bytes(episode["sample"])
    return EpisodeLine.model_validate(
        {
            **episode,
            "sample": sample.hex() or None,
            "is_success": None if solved is None else bool(solved),
            "client": episode["client"] or "",
            "started": episode["started"] or 0,
            "ended": episode["ended"] or 0.0,
            "undone": episode["undone"] or None,
            "preview": preview(ledger, episode),
        }
    )


def lines(ledger: LedgerReader, rest: str, parameters: Sequence[Any], *, limit: int) -> list[EpisodeLine]:
    """`rest` must make a query that an index answers."""
    return [line(ledger, each) for each in episodes(ledger, f"{rest} LIMIT {limit}", parameters)]


def preview(ledger: LedgerReader, episode: Episode) -> str:
    if episode["state"] != "ended":
        found = ledger.row(_LAST_FAILURE, (episode["sequence"],))
        failure: dict[str, Any] = json.loads(found[0]) if found else {}
        return storable(f"{failure.get('kind')}: {failure.get('message')}"[:PREVIEW_CHARS])
    with suppress(*BAD_CALLS):
        for call in ledger.calls_of(_LAST_CALL, (episode["sequence"], episode["attempt"])):
            return storable(" ".join(reply_text(call).split())[:PREVIEW_CHARS])
    return ""


SHOWN: dict[str, str] = {
    "all": "1 = 1",
    "accepted": "e.state = 'ended'",
    "failed": "e.state = 'failed'",
    "truncated": "e.state = 'ended' AND EXISTS (SELECT 1 FROM calls AS c WHERE c.episode = e.sequence "
    "AND c.attempt = a.attempt AND c.role = '' AND c.stop_reason = 'length')",
    "trained": "t.outcome = 'trained'",
    "untrained": "e.state = 'ended' AND t.outcome <> 'trained'",
}


def newest(
    ledger: LedgerReader, *, show: str = "all", before: int | None = None, limit: int = 50
) -> EpisodePage:
    found = scanned(ledger, SHOWN[show], last=(before or 2**62) - 1)
    return EpisodePage(**page_of(ledger, found, lambda _: True, limit))


def page_of(
    ledger: LedgerReader, found: Iterable[Episode | int], passes: Callable[[Episode], bool], limit: int
) -> dict[str, Any]:
    """Return up to `limit` passing episodes, and `next`, where to continue, within `SCAN_S` seconds.

    A number in `found` says that all episodes down to it were examined.
    """
    ends = time.monotonic() + SCAN_S
    shown: list[EpisodeLine] = []
    for each in found:
        if isinstance(each, int):
            number = each
        else:
            number = each["number"]
            if passes(each):
                shown.append(line(ledger, each))
        if len(shown) >= min(limit, MAX_LINES) or time.monotonic() > ends:
            return {"episodes": shown, "next": number}
    return {"episodes": shown, "next": None}


def scanned(
    ledger: LedgerReader, where: str, parameters: Sequence[Any] = (), *, first: int = 1, last: int
) -> Iterator[Episode | int]:
    """Yield newest episodes first, and sometimes a number to continue from."""
    newest = ledger.number("SELECT max(end_number) FROM episodes") or 0
    rest = f"e.end_number BETWEEN ? AND ? AND {where} ORDER BY e.end_number DESC LIMIT ?"
    last, count = min(last, int(newest)), FIRST_ROWS
    while last >= first:
        low = max(first, last - SPAN + 1)
        found = episodes(ledger, rest, (low, last, *parameters, count))
        yield from found
        last = low - 1 if len(found) < count else found[-1]["number"] - 1
        count = SCAN_ROWS
        if last >= first:
            yield last + 1


class StoredResult(msgspec.Struct):
    role_rewards: dict[str, float] = {}
    call_rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    log_metrics: dict[str, float] = {}


_read_result = msgspec.json.Decoder(StoredResult).decode


def result_of(ledger: LedgerReader, sequence: int) -> StoredResult:
    """Return an empty result if the episode failed."""
    found = ledger.row("SELECT result FROM results WHERE episode = ?", (sequence,))
    try:
        return _read_result(bytes(found[0])) if found is not None else StoredResult()
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotRecordedError(f"the ledger holds something else than a result: {error}") from error


def metrics_of(result: StoredResult) -> dict[str, float]:
    rewards = {f"role/{name}/reward": reward for name, reward in result.role_rewards.items()}
    return {**result.log_metrics, **rewards}


def figures_of(ledger: LedgerReader, episode: Episode) -> dict[str, float]:
    result = result_of(ledger, episode["sequence"]) if episode["state"] == "ended" else StoredResult()
    scores = result.metadata.get("scores")
    given = cast("dict[str, Any]", scores) if isinstance(scores, dict) else {}
    found: dict[str, Any] = {f"score/{name}": value for name, value in given.items()}
    found |= metrics_of(result) | ({} if episode["queued_s"] is None else {QUEUED: episode["queued_s"]})
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


MAX_QUERY_CHARS = 500
TEXTS = {
    "uuid": "e.uuid",
    "type": "e.episode_type",
    "label": "e.label",
    "group_id": "e.group_id",
    "status": "CASE WHEN e.state = 'ended' THEN 'accepted' WHEN e.failure = 'cancelled' THEN 'cancelled' "
    "ELSE 'failed' END",
    "client": "coalesce(a.client, '')",
    "outcome": "coalesce(t.outcome, '')",
}
NUMBERS = {
    "step": "e.step + 0",  # `+ 0` keeps SQLite from scanning a step by its index.
    "reward": "e.reward",
    "advantage": "t.advantage",
    "attempt": "coalesce(a.attempt, 0)",
    "is_success": "e.is_success",
    "undone": "e.undone",
}
"""Columns that SQL compares. We check other conditions episode by episode."""

SAMPLE = "sample"

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
    episodes: list[EpisodeLine]
    next: int | None = Field(description="`before` for the next page; null on the last page.")


@dataclass(frozen=True, slots=True)
class Query:
    words: list[str]
    conditions: list[tuple[str, str, str]]


def parse(text: str) -> Query:
    words: list[str] = []
    conditions: list[tuple[str, str, str]] = []
    for match in _TERM.finditer(text[:MAX_QUERY_CHARS]):
        phrase, word = match[1], match[2]
        found = _CONDITION.fullmatch(word) if word else None
        if found is None:
            words.append(phrase if phrase is not None else word)
            continue
        name, sign, value = found[1], found[2], found[3]
        if name not in (*TEXTS, SAMPLE) and not _is_number(value):
            if sign in ("=", ":"):  # Perhaps a word such as `https://...`.
                words.append(word)
                continue
            raise NotRecordedError(f"{word}: {value!r} is not a number")
        conditions.append((name, sign, value))
    return Query([word for word in words if word], conditions)


def search(ledger: LedgerReader, text: str, *, before: int | None = None, limit: int = 50) -> SearchPage:
    query = parse(text)
    if named := lines(ledger, "e.uuid = ?", (text.strip(),), limit=1):
        return SearchPage(episodes=named, next=None)
    first, last = _span(ledger, query.conditions)
    last = min(before or 2**62, last + 1) - 1
    where, parameters = _in_sql(query.conditions)
    if query.words:
        found = _with_words(ledger, query.words, where, parameters, first=first, last=last)
    else:
        found = scanned(ledger, where, parameters, first=first, last=last)
    others = [each for each in query.conditions if each[0] not in (*TEXTS, *NUMBERS, SAMPLE)]

    def holds(episode: Episode) -> bool:
        return all(_holds(ledger, episode, *condition) for condition in others)

    return SearchPage(**page_of(ledger, found, holds, limit))


def _span(ledger: LedgerReader, conditions: list[tuple[str, str, str]]) -> tuple[int, int]:
    asked = [(sign.replace(":", "="), float(value)) for name, sign, value in conditions if name == "step"]
    if not asked:
        return 1, 2**62
    where = " AND ".join(f"step {sign} ?" for sign, _ in asked)
    query = f"SELECT min(end_number), max(end_number) FROM episodes WHERE {where}"
    row = ledger.row(query, [value for _, value in asked])
    assert row is not None
    return (1, 0) if row[0] is None else (row[0], row[1])


def _in_sql(conditions: list[tuple[str, str, str]]) -> tuple[str, list[Any]]:
    where, parameters = ["1 = 1"], list[Any]()
    for name, sign, value in conditions:
        if name in TEXTS:
            where.append(f"substr({TEXTS[name]}, 1, {len(value)}) {'<>' if sign == '!=' else '='} ?")
            parameters.append(value)
        elif name == SAMPLE:
            where.append(f"{'NOT ' if sign == '!=' else ''}e.sample BETWEEN ? AND ?")
            parameters += _digests(value)
        elif name in NUMBERS:
            where.append(f"{NUMBERS[name]} {sign.replace(':', '=')} ?")
            parameters.append(float(value))
    return " AND ".join(where), parameters


def _digests(beginning: str) -> tuple[bytes, bytes]:
    half = len(beginning) % 2
    try:
        return bytes.fromhex(beginning + "0" * half), bytes.fromhex(beginning + "f" * half) + b"\xff" * 64
    except ValueError as error:
        raise NotRecordedError(f"{beginning!r} is not the beginning of a sample's digest") from error


def _with_words(
    ledger: LedgerReader, words: list[str], where: str, parameters: Sequence[Any], *, first: int, last: int
) -> Iterator[Episode | int]:
    """Like `scanned`, for episodes that contain all words."""
    index = SearchIndex.of(ledger)
    while last >= first:
        low, count = index.extend(first, last), FIRST_ROWS
        while numbers := index.find(words, low, last, count):
            among = ", ".join(map(str, numbers))
            rest = f"e.end_number IN ({among}) AND {where} ORDER BY e.end_number DESC"
            yield from episodes(ledger, rest, parameters)
            last, count = numbers[-1] - 1, SCAN_ROWS
            yield last + 1
        last = low - 1
        if last >= first:
            yield low


def _holds(ledger: LedgerReader, episode: Episode, name: str, sign: str, value: str) -> bool:
    number = episode[name] if name in NO_CALLS else figures_of(ledger, episode).get(name)
    return number is not None and _OPERATORS[sign](float(number), float(value))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
