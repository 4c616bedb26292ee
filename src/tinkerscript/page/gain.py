"""How much the held-out score rose between two evaluations, and how sure that is."""

from __future__ import annotations

import math
import statistics

from pydantic import BaseModel, Field

from tinkerscript.record.reader import Record

_SCORES = """
SELECT sample, avg(reward), min(uuid) FROM episodes
    WHERE step = ? AND label = ? AND type = 'eval' AND sample IS NOT NULL
        AND number NOT IN (SELECT episode FROM undone) GROUP BY sample
"""

NORMAL_95 = 1.96
"""Standard errors to each side of a mean that hold 95% of a normal distribution."""


class Gain(BaseModel):
    """The change of a sample's mean reward between two evaluations, over the samples that both have."""

    mean: float
    margin: float = Field(description="To each side of the mean: a 95% interval, from the samples' spread.")
    samples: int


def sample_scores(record: Record, *, step: int, label: str) -> dict[int, tuple[float | None, str]]:
    """The mean reward of each sample (by its number) in one evaluation, and an episode of it."""
    return {number: (score, uuid) for number, score, uuid in record.rows(_SCORES, (step, label))}


def gain(
    before: dict[int, tuple[float | None, str]], after: dict[int, tuple[float | None, str]]
) -> Gain | None:
    """None with fewer than two samples that have a score in both: nothing says how sure it would be."""
    changes: list[float] = []
    for number in before.keys() & after.keys():
        old, new = before[number][0], after[number][0]
        if old is not None and new is not None:
            changes.append(new - old)
    if len(changes) < 2:
        return None
    error = statistics.stdev(changes) / math.sqrt(len(changes))
    return Gain(mean=statistics.fmean(changes), margin=NORMAL_95 * error, samples=len(changes))
