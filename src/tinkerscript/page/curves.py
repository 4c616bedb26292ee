from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field

from tinkerscript.config import RunConfig
from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.page.lines import EpisodeLine, lines
from tinkerscript.rollouts.alignment.checks import ERRORS, WARNINGS

MAX_POINTS = 2000


class MetricCurve(BaseModel):
    steps: list[int] = Field(description="The first step of each span.")
    mean: list[float]
    low: list[float]
    high: list[float]


class Metric(BaseModel):
    name: str
    step: int
    value: float


class Curves(BaseModel):
    curves: dict[str, MetricCurve]


class ConfigDifference(BaseModel):
    key: str
    values: dict[str, Any] = Field(description="The value of each run.")


_SPAN = "SELECT min(step), max(step) FROM metrics WHERE name = ? AND undone = 0"

_CURVE = """
SELECT min(step), avg(value), min(value), max(value) FROM metrics WHERE name = ? AND undone = 0
    GROUP BY (step - ?) * ? / ? ORDER BY 1
"""


def metrics(ledger: LedgerReader) -> list[Metric]:
    newest = "SELECT step, value FROM metrics WHERE name = ? AND undone = 0 ORDER BY step DESC LIMIT 1"
    found: list[Metric] = []
    for name in metric_names(ledger):
        if (row := ledger.row(newest, (name,))) is not None:
            found.append(Metric(name=name, step=row[0], value=row[1]))
    return found


def metric_names(ledger: LedgerReader, prefix: str = "") -> list[str]:
    # The index lets us skip from name to name.
    following = "SELECT min(name) FROM metrics WHERE name > ? AND name < ?"
    names: list[str] = []
    last, end = prefix, f"{prefix}\U0010ffff"
    while row := ledger.row(following, (last, end)):
        if row[0] is None:
            break
        names.append(last := row[0])
    return names


def curve(ledger: LedgerReader, name: str, *, points: int = 400) -> MetricCurve | None:
    low, high = ledger.rows(_SPAN, (name,))[0]
    if low is None:
        return None
    rows = ledger.rows(_CURVE, (name, low, min(points, MAX_POINTS), high - low + 1))
    steps, mean, lowest, highest = (list(column) for column in zip(*rows, strict=True))
    return MetricCurve(steps=steps, mean=mean, low=lowest, high=highest)


def curves(ledger: LedgerReader, names: Iterable[str], *, points: int = 400) -> Curves:
    found = {name: curve(ledger, name, points=points) for name in names}
    return Curves(curves={name: each for name, each in found.items() if each is not None})


def config_differences(configs: Mapping[str, Mapping[str, Any]]) -> list[ConfigDifference]:
    if len(configs) == 1:
        configs = {"default": RunConfig().model_dump(mode="json"), **configs}
    flat = {run: dict(_flat(config)) for run, config in configs.items()}
    keys = sorted({key for settings in flat.values() for key in settings})
    return [
        ConfigDifference(key=key, values={run: settings.get(key) for run, settings in flat.items()})
        for key in keys
        if len({repr(settings.get(key)) for settings in flat.values()}) > 1
    ]


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))  # pyright: ignore[reportUnknownArgumentType]
    else:
        yield prefix, value


MAX_ROWS = 500
MEANINGS = {**ERRORS, **WARNINGS}
CURVES = (
    *("alignment/max_abs_dlogp", "alignment/mean_abs_dlogp", "alignment/effective_sample_size"),
    *("alignment/k1", "alignment/k3", "alignment/tokens_trained", "alignment/sequences_per_episode"),
)


class FindingKind(BaseModel):
    kind: str = Field(description="`finding` (a step), `error` (a sequence that did not train) or `warning`.")
    name: str
    meaning: str
    count: int
    steps: int
    first_step: int
    last_step: int


class AlignmentView(BaseModel):
    curves: dict[str, MetricCurve]
    kinds: list[FindingKind]


class FoundIn(BaseModel):
    step: int
    detail: str
    count: int
    episode: EpisodeLine | None


class FindingPage(BaseModel):
    found: list[FoundIn]


def alignment_view(ledger: LedgerReader) -> AlignmentView:
    query = (
        "SELECT kind, name, sum(count) AS count, count(DISTINCT step) AS steps, min(step) AS first_step, "
        "max(step) AS last_step FROM findings WHERE undone = 0 GROUP BY kind, name "
        "ORDER BY kind, 3 DESC, name"
    )
    curves = {name: curve(ledger, name) for name in CURVES}
    return AlignmentView(
        curves={name: found for name, found in curves.items() if found},
        kinds=[FindingKind(meaning=MEANINGS.get(row["name"], ""), **dict(row)) for row in ledger.rows(query)],
    )


def found_in(ledger: LedgerReader, kind: str, name: str) -> FindingPage:
    query = (
        "SELECT step, detail, count, episode FROM findings WHERE kind = ? AND name = ? AND undone = 0 "
        f"ORDER BY number DESC LIMIT {MAX_ROWS}"
    )
    rows = ledger.rows(query, (kind, name))
    if not rows:
        raise NotRecordedError(f"the run has no {kind} {name!r}")
    return FindingPage(
        found=[
            FoundIn(
                step=row["step"],
                detail=row["detail"],
                count=row["count"],
                episode=_line(ledger, row["episode"]),
            )
            for row in rows
        ]
    )


def _line(ledger: LedgerReader, uuid: str) -> EpisodeLine | None:
    found = lines(ledger, "e.uuid = ?", (uuid,), limit=1) if uuid else []
    return found[0] if found else None
