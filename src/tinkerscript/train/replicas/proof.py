"""Judges from logprobs whether a replica samples from the weights that it was given.

Two versions of an adapter differ by less than a bfloat16 replica's rounding noise. So the replica's changes
between versions are regressed on the trainer's over many tokens: the slope is near 1 for the newer version
and near 0 for the older one, whatever constant differences their kernels have. The standard error is a
jackknife over positions, where errors are correlated. With a float32 trainer the changes must also match up
to noise, because a few old weights leave the slope near 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tinkerscript.rollouts.call import FloatArray

Verdict = Literal["proved", "refused", "undecidable", "unchanged"]
"""`unchanged`: the trainer's logprobs are equal."""

# A slope within this of 1 means the newer version, any other another version, if it is this many standard
# errors away from the border.
FROM_ONE = 0.5
STANDARD_ERRORS = 3.0

# How much of a change may be missing, as a root mean square: this share of it, plus this multiple of the gap
# between replica and trainer.
PARTLY, TIMES_NOISE = 0.05, 4.0

# Replicas clip lower logprobs.
UNLIKELY = -30.0

SMALLEST_CHANGE = 1e-6
"""Root mean square in nats, below which a change is float32 rounding."""

# Rounding in a bfloat16 trainer pulls the slope towards 0 unless its change is this many times that gap.
OVER_NOISE = 2.0


@dataclass(frozen=True, slots=True)
class Evidence:
    verdict: Verdict
    slope: float
    """NaN if the trainer's logprobs do not change."""

    error: float
    """Infinite with too few positions."""

    gap: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.verdict}: slope {self.slope:.3f} ± {self.error:.3f} over {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of tokens under two versions, [N] per position."""

    older: Sequence[FloatArray]
    newer: Sequence[FloatArray]


def judge(replica: Scores, trainer: Scores, *, exact: bool = True) -> Evidence:
    """`exact`: the trainer computes in float32. Raises ValueError if shapes differ."""
    changes: list[tuple[FloatArray, FloatArray]] = []
    gap, noise = 0.0, 0.0
    for ours, theirs in zip(
        zip(trainer.older, trainer.newer, strict=True),
        zip(replica.older, replica.newer, strict=True),
        strict=True,
    ):
        four = np.stack([*ours, *theirs]).astype(np.float64)
        kept = four[:, np.isfinite(four).all(axis=0) & (four > UNLIKELY).all(axis=0)]
        changes.append((kept[1] - kept[0], kept[3] - kept[2]))
        gap = max(gap, float(np.abs(kept[3] - kept[1]).max(initial=0.0)))
        noise += float(((kept[2] - kept[0]) ** 2).sum())
    tokens = sum(len(x) for x, _ in changes)
    squares = np.array([float(x @ x) for x, _ in changes])
    products = np.array([float(x @ y) for x, y in changes])
    if not tokens or (squares.sum() / tokens) ** 0.5 < SMALLEST_CHANGE:
        return Evidence("unchanged", float("nan"), float("inf"), gap, tokens)
    slope = float(products.sum() / squares.sum())
    error = _jackknife(squares, products)
    missing = sum(float(((y - x) ** 2).sum()) for x, y in changes) ** 0.5
    if exact and missing > PARTLY * float(squares.sum()) ** 0.5 + TIMES_NOISE * noise**0.5:
        return Evidence("refused", slope, error, gap, tokens)
    is_loud = exact or squares.sum() > OVER_NOISE**2 * noise
    return Evidence(_verdict(slope, error) if is_loud else "undecidable", slope, error, gap, tokens)


def _jackknife(squares: np.ndarray, products: np.ndarray) -> float:
    others = squares.sum() - squares
    if len(squares) < 3 or (others <= 0).any():
        return float("inf")
    slopes = (products.sum() - products) / others
    n = len(slopes)
    return float(np.sqrt((n - 1) / n * ((slopes - slopes.mean()) ** 2).sum()))


def _verdict(slope: float, error: float) -> Verdict:
    distance = abs(slope - 1)
    if distance + STANDARD_ERRORS * error < FROM_ONE:
        return "proved"
    return "refused" if distance - STANDARD_ERRORS * error > FROM_ONE else "undecidable"
