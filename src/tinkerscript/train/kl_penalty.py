"""`KLPenalty`: the divergence from another model, such as the start policy or a teacher, as a part of each
advantage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import torch
from tinker_cookbook.rl.metrics import discounted_future_sum_vectorized

from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import FloatArray, IntArray

ReferenceLogprobs = Callable[[list[IntArray]], Awaitable[list[FloatArray]]]
"""Sequences of token ids, int32 [T] each, -> each token's log probability under a model that does not train,
float32 [T], [0] unused."""


class KLPenalty:
    """The reverse KL divergence from a reference model as part of each token's reward.

    For a sampled token, d = log p(sampler) - log p(reference): its mean over samples is KL(policy,
    reference). The token's advantage changes by -coef * d; from the start policy it is `centered`, which is
    coef * (mean(d) - d), with the mean over the batch's tokens with loss. These are tinker_cookbook's
    `incorporate_kl_penalty` of its distillation recipe and of its RL loop, except that tokens without loss
    get nothing.
    """

    def __init__(
        self, reference: ReferenceLogprobs, *, coef: float, discount: float, centered: bool = True
    ) -> None:
        """`discount`: how much of later tokens' divergence a token answers for; 0: only its own."""
        self._reference = reference
        self._coef = coef
        self._discount = discount
        self._centered = centered

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """The sequences with new advantages, and mean(d), in nats per token."""
        gaps, mean = divergence(items, await self._reference([item.rollout.tokens for item in items]))
        baseline = mean if self._centered else 0.0
        return [self._penalized(item, gap, baseline) for item, gap in zip(items, gaps, strict=True)], mean

    def _penalized(self, item: WeightedRollout, gap: FloatArray, baseline: float) -> WeightedRollout:
        mask = item.rollout.loss_mask
        reward = np.where(mask, self._coef * (baseline - gap), 0.0)
        if self._discount:
            reward = discounted_future_sum_vectorized(torch.from_numpy(reward), self._discount).numpy()
        added = np.where(mask, reward, 0.0).astype(np.float32)
        return WeightedRollout(item.rollout, item.advantages + added)


def divergence(
    items: Sequence[WeightedRollout], reference: Sequence[FloatArray]
) -> tuple[list[FloatArray], float]:
    """d of each token, float32 [T] for each sequence, 0 where a token carries no loss; and the mean over
    those that do. `reference`: float32 [T] each."""
    gaps = [
        np.where(item.rollout.loss_mask, item.rollout.logprobs - logprobs, np.float32(0))
        for item, logprobs in zip(items, reference, strict=True)
    ]
    tokens = sum(int(item.rollout.loss_mask.sum()) for item in items)
    return gaps, float(sum(gap.sum(dtype=np.float64) for gap in gaps)) / tokens
