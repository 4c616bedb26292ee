"""Reward shaping: distribute an episode's reward over its sampled tokens by position.

Each function returns float32 [R] for `Rollout.rewarded`. Invariant: the shares sum to the given reward, and
only sampled tokens have one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.rollout import Rollout


def at_end(rollout: Rollout, reward: float) -> FloatArray:
    """Put the whole reward on the last sampled token."""
    return by_call(rollout, [0.0] * (len(rollout.segments) - 1) + [reward])


def evenly(rollout: Rollout, reward: float) -> FloatArray:
    """Give each sampled token the same share."""
    return discounted(rollout, reward, 1.0)


def discounted(rollout: Rollout, reward: float, discount: float) -> FloatArray:
    """Give each sampled token `discount` times the share of the next one, so shares grow toward the end.

    Raises ValueError for a discount outside (0, 1].
    """
    if not 0 < discount <= 1:
        raise ValueError(f"a discount must be above 0 and at most 1, got {discount}")
    weights = discount ** np.arange(int(rollout.sampled.sum()) - 1, -1, -1, dtype=np.float64)
    return _placed(rollout, reward * weights / weights.sum())


def by_call(rollout: Rollout, rewards: Sequence[float]) -> FloatArray:
    """Put one reward per call (turn) on the last token that the call sampled.

    Raises ValueError if the numbers of rewards and calls differ.
    """
    if len(rewards) != len(rollout.segments):
        raise ValueError(f"{len(rewards)} rewards for {len(rollout.segments)} calls")
    shares = np.zeros(len(rollout.tokens), dtype=np.float32)
    for segment, reward in zip(rollout.segments, rewards, strict=True):
        shares[segment.end - 1] = reward
    return shares[rollout.prompt_length :]


def _placed(rollout: Rollout, values: npt.NDArray[np.float64]) -> FloatArray:
    shares = np.zeros(len(rollout.response_mask), dtype=np.float32)
    shares[rollout.response_mask] = values
    return shares
