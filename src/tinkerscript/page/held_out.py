from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.health import Gain, gain, sample_scores
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.page.lines import MAX_LINES, EpisodeLine, lines
from tinkerscript.page.overview import Evaluation, evaluations

SAMPLES_PER_PAGE = 100
INPUT_CHARS = 200
VERSION_POINTS = 400

Change = Literal["better", "worse", "same"]


class SampleChange(BaseModel):
    sample: str
    id: str
    input: str = Field(description="The beginning of the input.")
    before: float | None
    after: float | None
    before_uuid: str | None = Field(description="One of its episodes.")
    after_uuid: str | None
    change: Change


class Comparison(BaseModel):
    before: Evaluation
    after: Evaluation
    better: int
    worse: int
    same: int
    gain: Gain | None = Field(description="Null if fewer than two samples have a score in both evaluations.")
    samples: list[SampleChange] = Field(description="Sorted by the size of the change, largest first.")
    next: int | None = Field(description="`offset` of the following page.")


class ComparisonQuery(BaseModel):
    before: str = Field(default="", description="Label of an evaluation; by default the first.")
    after: str = Field(default="", description="Label of an evaluation; by default the last.")
    show: Change | Literal["all"] = "all"
    offset: int = Field(default=0, ge=0, description="Where to continue: `next` of the previous page.")


class Attempts(BaseModel):
    """Covers one policy version, or several consecutive versions if there are very many."""

    policy_version: int | None = Field(description="The first version; null if not recorded.")
    episodes: int
    mean_reward: float | None


class SampleView(BaseModel):
    digest: str
    id: str
    task: str
    sample: dict[str, Any] = Field(description="Inspect's `Sample` as JSON.")
    versions: list[Attempts]
    episodes: list[EpisodeLine] = Field(description="Newest first.")
    next: int | None = Field(description="`before` of the following page.")


_VERSIONS = """
SELECT min(a.policy_version), count(*), avg(reward) FROM episodes AS e
    JOIN attempts AS a ON a.episode = e.sequence
        AND a.attempt = (SELECT max(attempt) FROM attempts WHERE episode = e.sequence)
    WHERE e.sample = ? AND e.end_number IS NOT NULL AND e.undone = 0
    GROUP BY a.policy_version * ? / ? ORDER BY 1
"""


def compare(ledger: LedgerReader, query: ComparisonQuery) -> Comparison:
    every = evaluations(ledger)
    if not every:
        raise NotRecordedError("the run has not been evaluated yet")
    first, last = _labeled(every, query.before, 0), _labeled(every, query.after, -1)
    old, new = (sample_scores(ledger, step=each.step, label=each.label) for each in (first, last))
    changes = [_change(sample, old.get(sample), new.get(sample)) for sample in old.keys() | new.keys()]
    changes.sort(key=lambda c: (-_difference(c), c.sample))
    shown = [change for change in changes if query.show in ("all", change.change)]
    following = query.offset + SAMPLES_PER_PAGE
    page = shown[query.offset : following]
    for change in page:
        named = sample_of(ledger, change.sample) or SampleContent()
        change.id, change.input = named.id, input_text(named.content)[:INPUT_CHARS]
    counts = {kind: sum(c.change == kind for c in changes) for kind in ("better", "worse", "same")}
    return Comparison(
        before=first,
        after=last,
        **counts,
        gain=gain(old, new),
        samples=page,
        next=following if following < len(shown) else None,
    )


def _difference(change: SampleChange) -> float:
    return 0.0 if change.before is None or change.after is None else abs(change.after - change.before)


def _labeled(every: list[Evaluation], label: str, default: int) -> Evaluation:
    if not label:
        return every[default]
    found = next((each for each in every if each.label == label), None)
    if found is None:
        known = ", ".join(each.label for each in every)
        raise NotRecordedError(f"the run has no evaluation {label!r}; it has {known}")
    return found


def _change(
    sample: str, before: tuple[float | None, str] | None, after: tuple[float | None, str] | None
) -> SampleChange:
    old, new = before[0] if before else None, after[0] if after else None
    change: Change = "same"
    if old is not None and new is not None and old != new:
        change = "better" if new > old else "worse"
    return SampleChange(
        sample=sample,
        id="",
        input="",
        before=old,
        after=new,
        before_uuid=before[1] if before else None,
        after_uuid=after[1] if after else None,
        change=change,
    )


@dataclass(frozen=True, slots=True)
class SampleContent:
    id: str = ""
    task: str = ""
    # Inspect's `Sample`, or a client's registration.
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])


def sample_of(ledger: LedgerReader, digest: str | None) -> SampleContent | None:
    try:
        row = ledger.row("SELECT payload FROM samples WHERE digest = ?", (bytes.fromhex(digest or ""),))
    except ValueError as error:
        raise NotRecordedError(f"{digest!r} is not the digest of a sample") from error
    if row is None:
        return None
    payload: dict[str, Any] = json.loads(bytes(row[0]))
    given = payload.get("sample")
    content = cast("dict[str, Any]", given) if isinstance(given, dict) else payload
    return SampleContent(str(content.get("id", "")), str(payload.get("task", "")), content)


def input_text(sample: Mapping[str, Any]) -> str:
    given = sample.get("input", "")
    return (
        "\n".join(map(_message_text, cast("list[Any]", given))) if isinstance(given, list) else as_text(given)
    )


def _message_text(message: Any) -> str:
    content: Any = message.get("content", "") if isinstance(message, dict) else message  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return (
        "\n".join(map(_part_text, cast("list[Any]", content)))
        if isinstance(content, list)
        else as_text(content)
    )


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return as_text(part)
    known = cast("dict[str, Any]", part)
    return as_text(known.get("text") or f"({known.get('type')})")


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sample_view(
    ledger: LedgerReader, digest: str, *, before: int | None = None, limit: int = 50
) -> SampleView:
    sample = sample_of(ledger, digest)
    if sample is None:
        raise NotRecordedError(f"the run has no sample {digest!r}")
    versions = 1 + int(ledger.number("SELECT max(policy_version) FROM steps WHERE undone = 0") or 0)
    spans = (bytes.fromhex(digest), min(versions, VERSION_POINTS), versions)
    limit = min(limit, MAX_LINES)
    rest = "e.sample = ? AND e.end_number < ? ORDER BY e.end_number DESC"
    found = lines(ledger, rest, (bytes.fromhex(digest), before or 2**62), limit=limit)
    return SampleView(
        digest=digest,
        id=sample.id,
        task=sample.task,
        sample=dict(sample.content),
        versions=[
            Attempts(policy_version=version, episodes=count, mean_reward=mean)
            for version, count, mean in ledger.rows(_VERSIONS, spans)
        ],
        episodes=found,
        next=found[-1].number if len(found) == limit else None,
    )
