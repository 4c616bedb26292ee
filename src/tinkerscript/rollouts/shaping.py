"""Token-level rewards by position: how an episode's reward is shared out among the sampled tokens.

Each function gives float32 [R] for `Rollout.rewarded`. The invariant: the shares sum to the reward that was
given, and no token that was not sampled has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.rollout import Rollout


def at_end(rollout: Rollout, reward: float) -> FloatArray:
    """All of it on the last sampled token."""
    return by_call(rollout, [0.0] * (len(rollout.segments) - 1) + [reward])


def evenly(rollout: Rollout, reward: float) -> FloatArray:
    """The same share for each sampled token."""
    return discounted(rollout, reward, 1.0)


def discounted(rollout: Rollout, reward: float, discount: float) -> FloatArray:
    """Shares that grow towards the end: each sampled token's is `discount` times the next one's.

    Raises ValueError for a discount outside (0, 1].
    """
    if not 0 < discount <= 1:
        raise ValueError(f"a discount must be above 0 and at most 1, got {discount}")
    weights = discount ** np.arange(int(rollout.sampled.sum()) - 1, -1, -1, dtype=np.float64)
    return _placed(rollout, reward * weights / weights.sum())


def by_call(rollout: Rollout, rewards: Sequence[float]) -> FloatArray:
    """One reward for each call (turn) of the rollout, on the last token that it sampled.

    Raises ValueError for another number of rewards than of calls.
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
