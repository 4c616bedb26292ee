"""Token alignment over time: how close trainer and sampler are, and what did not fit, with its episodes."""

from __future__ import annotations

from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.page.curves import MetricCurve, curve
from tinkerscript.page.lines import COLUMNS, EpisodeLine, line
from tinkerscript.record.reader import Record
from tinkerscript.rollouts.alignment.checks import ERRORS, WARNINGS

MAX_ROWS = 500
MEANINGS = {**ERRORS, **WARNINGS}
CURVES = (
    *("alignment/max_abs_dlogp", "alignment/mean_abs_dlogp", "alignment/effective_sample_size"),
    *("alignment/k1", "alignment/k3", "alignment/tokens_trained", "alignment/sequences_per_episode"),
)


class FindingKind(BaseModel):
    """What was found, by name, over the whole run."""

    kind: str = Field(description="finding: a step; error: a sequence that did not train; warning.")
    name: str
    meaning: str
    count: int
    steps: int
    first_step: int
    last_step: int


class AlignmentView(BaseModel):
    """The report over time."""

    curves: dict[str, MetricCurve]
    kinds: list[FindingKind]


class FoundIn(BaseModel):
    """One finding."""

    step: int
    detail: str
    count: int
    episode: EpisodeLine | None


class FindingPage(BaseModel):
    found: list[FoundIn]


def alignment_view(record: Record) -> AlignmentView:
    query = (
        "SELECT kind, name, sum(count) AS count, count(DISTINCT step) AS steps, min(step) AS first_step, "
        "max(step) AS last_step FROM findings GROUP BY kind, name ORDER BY kind, 3 DESC"
    )
    curves = {name: curve(record, name) for name in CURVES}
    return AlignmentView(
        curves={name: found for name, found in curves.items() if found},
        kinds=[FindingKind(meaning=MEANINGS.get(row["name"], ""), **dict(row)) for row in record.rows(query)],
    )


def found_in(record: Record, kind: str, name: str) -> FindingPage:
    """The newest findings of a kind and name. Raises NotRecordedError if there are none."""
    query = (
        "SELECT step, detail, count, episode FROM findings WHERE kind = ? AND name = ? "
        f"ORDER BY number DESC LIMIT {MAX_ROWS}"
    )
    rows = record.rows(query, (kind, name))
    if not rows:
        raise NotRecordedError(f"the run has no {kind} {name!r}")
    return FindingPage(
        found=[
            FoundIn(
                step=row["step"],
                detail=row["detail"],
                count=row["count"],
                episode=_line(record, row["episode"]),
            )
            for row in rows
        ]
    )


def _line(record: Record, uuid: str) -> EpisodeLine | None:
    row = record.row(f"SELECT {COLUMNS} FROM episodes WHERE uuid = ?", (uuid,)) if uuid else None
    return None if row is None else line(row)
