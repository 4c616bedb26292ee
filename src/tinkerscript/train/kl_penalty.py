"""`KLPenalty`: the divergence from the start policy as a part of each token's reward.

For a sampled token, d = log p(sampler) - log p(start). Its advantage grows by coef * (mean(d) - d), with the
mean over the sampled tokens of the batch: tinker_cookbook's `incorporate_kl_penalty`, without its spill onto
tokens that were not sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from tinker_cookbook.rl.metrics import discounted_future_sum_vectorized

from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.types import WeightedRollout

StartLogprobs = Callable[[list[IntArray]], Awaitable[list[FloatArray]]]
"""Token ids int32 [T] of sequences in; out, for each, the start policy's log probability of each token,
float32 [T], [0] unused."""


class KLPenalty:
    """Adds the penalty to advantages."""

    def __init__(self, start_logprobs: StartLogprobs, *, coef: float, discount: float = 0.0) -> None:
        """`discount`: with which a token answers for the divergence of later ones; 0: for its own alone."""
        self._start_logprobs = start_logprobs
        self._coef = coef
        self._discount = discount

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """The sequences with new advantages, and mean(d): an estimate of KL(policy, start), nats a token."""
        start = await self._start_logprobs([item.rollout.tokens for item in items])
        gaps = [self._gap(item, logprobs) for item, logprobs in zip(items, start, strict=True)]
        sampled = sum(int(item.rollout.sampled.sum()) for item in items)
        mean = float(sum(gap.sum(dtype=np.float64) for gap in gaps)) / sampled
        return [self._with(item, gap, mean) for item, gap in zip(items, gaps, strict=True)], mean

    def _gap(self, item: WeightedRollout, start: FloatArray) -> FloatArray:
        """d, float32 [T]: 0 where no token was sampled."""
        return np.where(item.rollout.sampled, item.rollout.logprobs - start, np.float32(0))

    def _with(self, item: WeightedRollout, gap: FloatArray, mean: float) -> WeightedRollout:
        sampled = item.rollout.sampled
        reward = np.where(sampled, self._coef * (mean - gap), 0.0)
        if self._discount:
            reward = discounted_future_sum_vectorized(torch.from_numpy(reward), self._discount).numpy()
        added = np.where(sampled, reward, 0.0).astype(np.float32)
        return WeightedRollout(item.rollout, item.advantages + added)
