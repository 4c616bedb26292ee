"""`KLPenalty`: the divergence from the start policy, as a part of each advantage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from tinker_cookbook.rl.metrics import discounted_future_sum_vectorized

from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import FloatArray, IntArray

StartLogprobs = Callable[[list[IntArray]], Awaitable[list[FloatArray]]]
"""Sequences of token ids, int32 [T] each, -> each token's log probability under the start policy, float32
[T], [0] unused."""


class KLPenalty:
    """The divergence from the start policy as part of each token's reward.

    For a sampled token, d = log p(sampler) - log p(start). Its advantage grows by coef * (mean(d) - d), with
    the mean over the batch's tokens with loss: tinker_cookbook's `incorporate_kl_penalty`, except that tokens
    without loss get nothing.
    """

    def __init__(self, start_logprobs: StartLogprobs, *, coef: float, discount: float) -> None:
        """`discount`: how much of later tokens' divergence a token answers for; 0: only its own."""
        self._start_logprobs = start_logprobs
        self._coef = coef
        self._discount = discount

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """The sequences with new advantages, and mean(d): an estimate of KL(policy, start), nats per
        token."""
        start = await self._start_logprobs([item.rollout.tokens for item in items])
        gaps = [  # d, float32 [T] each: 0 where a token carries no loss
            np.where(item.rollout.loss_mask, item.rollout.logprobs - logprobs, np.float32(0))
            for item, logprobs in zip(items, start, strict=True)
        ]
        tokens = sum(int(item.rollout.loss_mask.sum()) for item in items)
        mean = float(sum(gap.sum(dtype=np.float64) for gap in gaps)) / tokens
        return [self._penalized(item, gap, mean) for item, gap in zip(items, gaps, strict=True)], mean

    def _penalized(self, item: WeightedRollout, gap: FloatArray, mean: float) -> WeightedRollout:
        mask = item.rollout.loss_mask
        reward = np.where(mask, self._coef * (mean - gap), 0.0)
        if self._discount:
            reward = discounted_future_sum_vectorized(torch.from_numpy(reward), self._discount).numpy()
        added = np.where(mask, reward, 0.0).astype(np.float32)
        return WeightedRollout(item.rollout, item.advantages + added)
