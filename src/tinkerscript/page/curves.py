"""Curves of metrics over steps, and how the configs of runs differ.

Invariant: a curve has at most as many points as were asked for, whatever the number of steps: each is the
mean of a span, with the lowest and the highest value in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field

from tinkerscript.config import RunConfig
from tinkerscript.record.reader import Record

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
