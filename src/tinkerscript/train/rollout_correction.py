"""Correction of the policy gradient where the sampler's probabilities are not the trainer's.

With q the sampler's probability of a token, old the trainer's before the update, and p the policy's while it
trains, the loss compares p with old, and each token is weighed by f(old / q), a constant: the first ratio is
what the update changes, the second what differs without it. f cuts the weight off at a cap (truncated
importance sampling) or leaves out what is above it (masked importance sampling).

Sources: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (truncated,
by token); Liu et al. 2025, "When Speed Kills Stability" (by sequence, and masked).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tinkerscript.config import RolloutCorrectionConfig
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.rollout import Rollout


def correct(
    batch: Sequence[WeightedRollout], trainer: Sequence[FloatArray], config: RolloutCorrectionConfig
) -> tuple[list[WeightedRollout], dict[str, float]]:
    """The batch with the trainer's log probabilities (float32 [T] each) as reference and weighed advantages.

    The metrics are over the tokens that carry loss: the mean weight, the share above the cap, and the largest
    ratio.
    """
    corrected: list[WeightedRollout] = []
    ratios: list[FloatArray] = []
    weights: list[FloatArray] = []
    for item, old in zip(batch, trainer, strict=True):
        ratio = _ratio(item.rollout, old, config.level)
        weight = np.minimum(ratio, config.cap)
        if config.method == "mask":
            weight = np.where(ratio > config.cap, np.float32(0), ratio)
        scaled = np.where(item.rollout.loss_mask, item.advantages * weight, np.float32(0))
        corrected.append(replace(item, advantages=scaled.astype(np.float32), reference=old))
        ratios.append(ratio[item.rollout.loss_mask])
        weights.append(weight[item.rollout.loss_mask])
    every = np.concatenate(ratios)
    return corrected, {
        "correction/weight": float(np.concatenate(weights).mean()),
        "correction/capped": float((every > config.cap).mean()),
        "correction/max_ratio": float(every.max()),
    }


def _ratio(rollout: Rollout, old: FloatArray, level: str) -> FloatArray:
    """float32 [T]: old / q of each token, or of the whole sequence; 1 where a token carries no loss."""
    gaps = np.where(rollout.loss_mask, old.astype(np.float64) - rollout.logprobs, 0.0)
    if level == "sequence":
        gaps = np.where(rollout.loss_mask, gaps.sum(), 0.0)
    # Beyond any cap that has a meaning; a larger one would not be a finite float32.
    return np.exp(np.minimum(gaps, 80.0)).astype(np.float32)
