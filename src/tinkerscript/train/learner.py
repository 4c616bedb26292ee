"""`KLPenalty`: the divergence from the start policy as a part of each token's reward.

For a sampled token, d = log p(sampler) - log p(start). Its advantage grows by coef * (mean(d) - d), with the
mean over the sampled tokens of the batch: tinker_cookbook's `incorporate_kl_penalty`, without its spill onto
tokens that were not sampled.

The gradient side of GRPO: groups of rollouts in, one update of the weights out.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np
import torch
from tinker_cookbook.rl.metrics import discounted_future_sum_vectorized

from tinkerscript.config import TrainingConfig
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.convert.tinker_datum import to_datum, to_scoring_datum
from tinkerscript.rollouts.convert.traits import TRAITS
from tinkerscript.rollouts.rollout import RolloutGroup, WeightedRollout
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel
from tinkerscript.train.backends.base import TrainingClient
from tinkerscript.train.optimizer import learning_rate, optimizer_step

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


class Learner:
    """Turns groups into minibatches, checks alignment, and steps the optimizer."""

    def __init__(
        self,
        client: TrainingClient,
        config: TrainingConfig,
        *,
        model: TrainedModel,
        report: AlignmentReport,
        seed: int,
        start_logprobs: StartLogprobs | None = None,
    ) -> None:
        """`start_logprobs`: of the start policy; needed for `kl_penalty_coef`."""
        self._client = client
        self._config = config
        self._report = report
        self._check = AlignmentCheck(report, config, model)
        self._seed = seed
        self._penalty: KLPenalty | None = None
        if config.kl_penalty_coef:
            assert start_logprobs is not None
            self._penalty = KLPenalty(
                start_logprobs, coef=config.kl_penalty_coef, discount=config.kl_discount_factor
            )

    async def update(
        self, groups: Sequence[RolloutGroup], *, step: int, lags: Mapping[int, int] | None = None
    ) -> dict[str, float]:
        """One batch: compare log probabilities, then one optimizer step for each minibatch of each epoch.

        Groups without a difference in reward do not train.

        `lags`: training steps by which each policy version is behind the weights as they are before this
        step; None: all are current. Raises AlignmentError, with the weights unchanged, if the batch is
        misaligned and the config says to stop then.
        """
        sound = [(group.rewards_differ, self._check.sound(group)) for group in groups]
        batch = [item for differs, items in sound if differs for item in items]
        # A step in which nothing trains is compared too, by one group.
        compared = batch or next((items for _, items in sound if items), [])
        kept = await self._compare(compared, lags, step)
        self._check.siblings(groups, step=step)
        metrics = {"train/sequences": 0.0, "train/learning_rate": self.learning_rate(step)}
        if batch and kept:
            metrics |= await self._train(kept, step)
        return metrics

    async def _train(self, batch: list[WeightedRollout], step: int) -> dict[str, float]:
        metrics = {"train/sequences": float(len(batch))}
        for item in batch:
            self._report.add_trained(item.rollout)
        if self._penalty is not None:
            batch, metrics["train/kl_start"] = await self._penalty.apply(batch)
        parts = [
            part
            for epoch in range(self._config.epochs_per_batch)
            for part in minibatches(batch, self._config.minibatches, seed=f"{self._seed}/{step}/{epoch}")
        ]
        results = [await self._minibatch(part, step) for part in parts]
        for key in results[0]:
            metrics[key] = float(np.mean([result[key] for result in results]))
        return metrics

    async def save_checkpoint(self, name: str) -> None:
        """Weights and optimizer state, durably, under `name`."""
        await self._client.save_state(name)

    def learning_rate(self, step: int) -> float:
        """The rate of a step, from 1."""
        return learning_rate(self._config, step, steps=self._config.steps)

    async def _compare(
        self, items: list[WeightedRollout], lags: Mapping[int, int] | None, step: int
    ) -> list[WeightedRollout]:
        """Those that may train, by the trainer's log probabilities before any update of this step."""
        if not items:
            return []
        output = await self._client.forward(
            [to_scoring_datum(item.rollout) for item in items], "cross_entropy"
        )
        trainer: list[FloatArray] = [
            np.concatenate([[0.0], result["logprobs"].to_numpy()]).astype(np.float32)
            for result in output.loss_fn_outputs
        ]
        return self._check.compare(items, trainer, lags=lags, step=step)

    async def _minibatch(self, part: list[WeightedRollout], step: int) -> dict[str, float]:
        """Advantages are divided by the number of sequences, so that the gradient is their mean."""
        config = self._config
        # The alignment report has said what it thinks of each; nothing more is lost here.
        datums = [to_datum(item.scaled(1 / len(part)), allow=TRAITS) for item in part]
        clip = {"clip_low_threshold": 1 - config.clip_low, "clip_high_threshold": 1 + config.clip_high}
        loss_config = None if config.loss_fn == "importance_sampling" else clip
        return await optimizer_step(
            self._client,
            datums,
            config,
            loss_fn=config.loss_fn,
            loss_config=loss_config,
            learning_rate=self.learning_rate(step),
        )


def minibatches(batch: Sequence[WeightedRollout], number: int, *, seed: str) -> list[list[WeightedRollout]]:
    """The batch shuffled and cut into `number` parts, fewer if it has fewer sequences.

    The parts depend on the seed and on what the batch holds, not on the order in which it came: episodes
    that end in another order, or a step that is made again, train the same.
    """
    ordered = sorted(batch, key=lambda item: (item.rollout.tokens.tobytes(), item.advantages.tobytes()))
    random.Random(seed).shuffle(ordered)
    size = -(-len(ordered) // number)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]
