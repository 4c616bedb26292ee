"""`Gap`: the sampler's log probabilities against the trainer's, as sums that add up over sequences.

With d = trainer - sampler over the sampled tokens: k1 = mean(-d) and k3 = mean(exp(d) - 1 - d) estimate the
divergence KL(sampler || trainer) (Schulman 2020, "Approximating KL divergence"); the effective sample size is
(sum w)^2 / (n sum w^2) with w = exp(d).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.call import FloatArray

MOST = 50.0
"""|d| beyond this counts as this, so that one impossible token leaves the sums finite."""


@dataclass
class Gap:
    """Sums over n tokens; empty at first."""

    tokens: int = 0
    sum_d: float = 0.0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    sum_k3: float = 0.0
    sum_w: float = 0.0
    sum_w2: float = 0.0

    @classmethod
    def between(cls, sampler: FloatArray, trainer: FloatArray) -> Gap:
        """Of the log probabilities of n sampled tokens, float32 [n] each. Raises AlignmentError for NaN."""
        d = trainer.astype(np.float64) - sampler
        if np.isnan(d).any():
            raise AlignmentError("the trainer's or the sampler's log probabilities are not numbers")
        d = d.clip(-MOST, MOST)
        w = np.exp(d)
        magnitude = np.abs(d)
        return cls(
            tokens=len(d),
            sum_d=float(d.sum()),
            sum_abs=float(magnitude.sum()),
            max_abs=float(magnitude.max(initial=0.0)),
            sum_k3=float((w - 1 - d).sum()),
            sum_w=float(w.sum()),
            sum_w2=float((w * w).sum()),
        )

    def add(self, other: Gap) -> None:
        self.tokens += other.tokens
        self.sum_d += other.sum_d
        self.sum_abs += other.sum_abs
        self.max_abs = max(self.max_abs, other.max_abs)
        self.sum_k3 += other.sum_k3
        self.sum_w += other.sum_w
        self.sum_w2 += other.sum_w2

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / self.tokens if self.tokens else 0.0

    def metrics(self) -> dict[str, float]:
        """By name; empty for a gap of no tokens."""
        if not self.tokens:
            return {}
        return {
            "mean_abs_dlogp": self.mean_abs,
            "max_abs_dlogp": self.max_abs,
            "k1": -self.sum_d / self.tokens,
            "k3": self.sum_k3 / self.tokens,
            "effective_sample_size": self.sum_w**2 / (self.tokens * self.sum_w2),
            "tokens_compared": float(self.tokens),
        }

    def as_json(self) -> dict[str, float]:
        return {key: value for key, value in asdict(self).items() if math.isfinite(value)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Gap:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})
