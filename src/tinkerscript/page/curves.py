"""Curves of metrics over steps, how the configs of runs differ, and token alignment over time.

Invariant: a curve has at most as many points as were asked for, whatever the number of steps: each is the
mean of a span, with the lowest and the highest value in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field

from tinkerscript.config import RunConfig
from tinkerscript.errors import NotRecordedError
from tinkerscript.page.lines import EPISODE_COLUMNS, EpisodeLine, line
from tinkerscript.record.reader import Record
from tinkerscript.rollouts.alignment.checks import ERRORS, WARNINGS

MAX_POINTS = 2000


class MetricCurve(BaseModel):
    """A metric over steps; all lists are equally long."""

    steps: list[int] = Field(description="The first step of each span.")
    mean: list[float]
    low: list[float]
    high: list[float]


class Metric(BaseModel):
    """A metric's newest value."""

    name: str
    step: int
    value: float


class Curves(BaseModel):
    curves: dict[str, MetricCurve]


class ConfigDifference(BaseModel):
    """A setting that runs do not share."""

    key: str
    values: dict[str, Any] = Field(description="By run.")


_SPAN = "SELECT min(step), max(step) FROM metrics WHERE name = ?"

_CURVE = """
SELECT min(step), avg(value), min(value), max(value) FROM metrics WHERE name = :name
    GROUP BY (step - :low) * :points / :span ORDER BY 1
"""


def metrics(record: Record) -> list[Metric]:
    """Every metric with its newest value."""
    found: list[Metric] = []
    for name, number in record.rows("SELECT name, number FROM names ORDER BY name"):
        newest = record.row(
            "SELECT step, value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1", (number,)
        )
        if newest is not None:
            found.append(Metric(name=name, step=newest[0], value=newest[1]))
    return found


def curve(record: Record, name: str, *, points: int = 400) -> MetricCurve | None:
    """The curve of one metric; None if the run has no such metric."""
    number = record.number("SELECT number FROM names WHERE name = ?", (name,))
    low, high = record.rows(_SPAN, (number,))[0] if number is not None else (None, None)
    if low is None:
        return None
    parameters = {"name": number, "low": low, "span": high - low + 1, "points": min(points, MAX_POINTS)}
    rows = record.rows(_CURVE, parameters)
    steps, mean, lowest, highest = (list(column) for column in zip(*rows, strict=True))
    return MetricCurve(steps=steps, mean=mean, low=lowest, high=highest)


def curves(record: Record, names: Iterable[str], *, points: int = 400) -> Curves:
    """The curves of those of `names` that the run has."""
    found = {name: curve(record, name, points=points) for name in names}
    return Curves(curves={name: each for name, each in found.items() if each is not None})


def config_differences(configs: Mapping[str, Mapping[str, Any]]) -> list[ConfigDifference]:
    """The settings that differ between runs, or from the defaults those of one run. `configs`: by run."""
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
    row = record.row(f"SELECT {EPISODE_COLUMNS} FROM episodes WHERE uuid = ?", (uuid,)) if uuid else None
    return None if row is None else line(row)
