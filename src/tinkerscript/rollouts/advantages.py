"""`AdvantageRule`: from the rewards of a group to advantages, in double precision.

r: rewards of a group of G episodes. Invariant: a group with equal rewards has advantages of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

SMALL = 1e-6
"""Added to the deviation, so that differences from rounding alone give no large advantages."""

Baseline = Literal["group_mean", "leave_one_out"]
Scale = Literal["none", "group_deviation"]


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """Advantage = (r - baseline) / scale."""

    baseline: Baseline = "group_mean"
    """`group_mean`: the mean of r (Liu et al. 2025, "Understanding R1-Zero-Like Training", who do not divide
    by the deviation). `leave_one_out`: for each episode, the mean of the other G - 1 rewards (Ahmadian et al.
    2024, "Back to Basics"); its advantages are G / (G - 1) times the former's."""

    scale: Scale = "none"
    """`group_deviation`: the sample standard deviation of r, over G - 1 (Shao et al. 2024,
    "DeepSeekMath")."""

    def baselines(self, rewards: Sequence[float]) -> Doubles:
        """float64 [G]. Raises ValueError for `leave_one_out` of a single episode."""
        r = np.asarray(rewards, dtype=np.float64)
        if self.baseline == "group_mean":
            return np.full(len(r), r.mean())
        if len(r) < 2:
            raise ValueError("leave_one_out needs a group of two episodes or more")
        return (r.sum() - r) / (len(r) - 1)

    def divisor(self, rewards: Sequence[float]) -> float:
        """1 for `none` and for equal rewards."""
        if self.scale == "none" or max(rewards) == min(rewards):
            return 1.0
        return float(np.std(np.asarray(rewards, dtype=np.float64), ddof=1)) + SMALL


PLAIN = AdvantageRule()
"""Reward minus the group mean."""
