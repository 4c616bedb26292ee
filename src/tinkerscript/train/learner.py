"""`Learner`: the gradient side of GRPO. One `update` is check, advantages, compare, loss, optimizer step.

Invariant: nothing trains that the alignment check has not passed, so a misaligned step changes no weights.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from tinker.types import LossFnType
from tinker_cookbook.rl.metrics import discounted_future_sum_vectorized

from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.losses import LOSSES, Loss, resolve_loss
from tinkerscript.errors import ConfigError, EngineRequestError
from tinkerscript.rollouts.advantages import AdvantageRule
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.convert.tinker_datum import to_datum, to_scoring_datum
from tinkerscript.rollouts.convert.traits import TRAITS
from tinkerscript.rollouts.rollout import RolloutGroup, WeightedRollout
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel
from tinkerscript.train.backends.backend import TrainingClient
from tinkerscript.train.optimizer import learning_rate, optimizer_step

StartLogprobs = Callable[[list[IntArray]], Awaitable[list[FloatArray]]]
"""Sequences of token ids, int32 [T] each, -> each token's log probability under the start policy, float32
[T], [0] unused."""

DATUM_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
"""What `to_datum` gives a loss."""


class Learner:
    """Updates the weights behind `client` from groups of rollouts."""

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
        """`start_logprobs` is needed for `kl_penalty_coef`. Raises ConfigError for an unknown `loss_fn`."""
        self.rule = AdvantageRule(config.advantage_baseline, config.advantage_scale)
        self._client = client
        self._config = config
        self._report = report
        self._check = AlignmentCheck(report, config, model)
        self._seed = seed
        self._loss_config = _loss_config(config, policy_loss(config))
        self._penalty: KLPenalty | None = None
        if config.kl_penalty_coef:
            assert start_logprobs is not None
            self._penalty = KLPenalty(
                start_logprobs, coef=config.kl_penalty_coef, discount=config.kl_discount_factor
            )

    async def update(
        self, groups: Sequence[RolloutGroup], *, step: int, lags: Mapping[int, int] | None = None
    ) -> dict[str, float]:
        """One training step on a batch of groups; returns its `train/` metrics.

        `lags`: training steps that each policy version is behind the current weights; None: all are current.
        Raises AlignmentError, with the weights unchanged, if the batch is misaligned and the config says to
        stop then.
        """
        # Check each sequence by itself: ids, masks, temperature.
        sound = [self._check.sound(group) for group in groups]
        # Advantages. A group whose rewards are all equal carries no gradient.
        weighted = [list(group.weighted(self.rule)) for group in sound]
        batch = [
            item
            for group, items in zip(sound, weighted, strict=True)
            if group.rewards_differ
            for item in items
        ]
        # Compare the sampler's log probabilities with the trainer's; where nothing trains, of one group.
        compared = batch or next((items for items in weighted if items), [])
        aligned = await self._aligned(compared, lags, step)
        self._check.siblings(groups, step=step)
        # Loss and optimizer steps.
        metrics = {"train/sequences": 0.0, "train/learning_rate": self.learning_rate(step)}
        if batch and aligned:
            metrics |= await self._train(aligned, step)
        return metrics

    async def _aligned(
        self, items: list[WeightedRollout], lags: Mapping[int, int] | None, step: int
    ) -> list[WeightedRollout]:
        """The sequences whose logprobs the trainer reproduces, before any update of this step."""
        if not items:
            return []
        datums = [to_scoring_datum(item.rollout) for item in items]
        output = await self._client.forward(datums, "cross_entropy")
        trainer: list[FloatArray] = [
            np.concatenate([[0.0], result["logprobs"].to_numpy()]).astype(np.float32)  # (T,)
            for result in output.loss_fn_outputs
        ]
        return self._check.compare(items, trainer, lags=lags, step=step)

    async def _train(self, batch: list[WeightedRollout], step: int) -> dict[str, float]:
        """One optimizer step for each minibatch of each epoch; metrics are means over them."""
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

    async def _minibatch(self, part: list[WeightedRollout], step: int) -> dict[str, float]:
        """One optimizer step. The loss is a sum over tokens, averaged over the minibatch's sequences."""
        # TRAITS: the alignment check has already reported what a Datum does not carry.
        datums = [to_datum(item.scaled(1 / len(part)), allow=TRAITS) for item in part]
        return await optimizer_step(
            self._client,
            datums,
            self._config,
            loss_fn=cast(LossFnType, self._config.loss_fn),
            loss_config=self._loss_config or None,
            learning_rate=self.learning_rate(step),
        )

    def learning_rate(self, step: int) -> float:
        """The rate of a step, from 1."""
        return learning_rate(self._config, step, steps=self._config.steps)

    async def save_checkpoint(self, name: str) -> None:
        """Write weights and optimizer state durably, under `name`."""
        await self._client.save_state(name)


def minibatches(batch: Sequence[WeightedRollout], number: int, *, seed: str) -> list[list[WeightedRollout]]:
    """The batch shuffled and cut into `number` parts, fewer if it has fewer sequences.

    The parts depend on the seed and on the batch's content, not on its order: a step trains the same if its
    episodes end in another order, or if it is repeated after a restart.
    """
    ordered = sorted(batch, key=lambda item: (item.rollout.tokens.tobytes(), item.advantages.tobytes()))
    random.Random(seed).shuffle(ordered)
    size = -(-len(ordered) // number)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


# The loss


def policy_loss(config: TrainingConfig) -> Loss:
    """The loss that `loss_fn` names. Raises ConfigError if it is unknown or is not a policy-gradient loss."""
    try:
        loss = resolve_loss(config.loss_fn)
    except EngineRequestError as error:
        raise ConfigError(f"training.loss_fn: {error}") from error
    if missing := loss.inputs - DATUM_INPUTS:
        raise ConfigError(
            f"training.loss_fn: {config.loss_fn!r} needs {', '.join(sorted(missing))}, which rollouts do "
            "not have; use a policy-gradient loss such as ppo"
        )
    if unknown := config.loss_config.keys() - loss.settings.keys():
        raise ConfigError(
            f"training.loss_config: {config.loss_fn!r} has no setting {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(loss.settings)) or 'none'}"
        )
    return loss


def check_loss(config: RunConfig) -> None:
    """Raises ConfigError if the run's backend cannot train with `training.loss_fn`."""
    policy_loss(config.training)
    if config.engine.backend == "tinker" and config.training.loss_fn not in LOSSES:
        raise ConfigError(
            f"training.loss_fn: {config.training.loss_fn!r} needs the embedded engine; a service behind "
            "Tinker's protocol knows only its own losses"
        )


def _loss_config(config: TrainingConfig, loss: Loss) -> dict[str, float]:
    """`loss_fn_config`: the clip thresholds if the loss has them, and `loss_config`."""
    clip = {"clip_low_threshold": 1 - config.clip_low, "clip_high_threshold": 1 + config.clip_high}
    return {key: value for key, value in clip.items() if key in loss.settings} | config.loss_config


# The KL penalty


class KLPenalty:
    """The divergence from the start policy as part of each token's reward.

    For a sampled token, d = log p(sampler) - log p(start). Its advantage grows by coef * (mean(d) - d), with
    the mean over the batch's sampled tokens: tinker_cookbook's `incorporate_kl_penalty`, except that tokens
    that were not sampled get nothing.
    """

    def __init__(self, start_logprobs: StartLogprobs, *, coef: float, discount: float = 0.0) -> None:
        """`discount`: how much of later tokens' divergence a token answers for; 0: only its own."""
        self._start_logprobs = start_logprobs
        self._coef = coef
        self._discount = discount

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """The sequences with new advantages, and mean(d): an estimate of KL(policy, start), nats per
        token."""
        start = await self._start_logprobs([item.rollout.tokens for item in items])
        gaps = [  # d, float32 [T] each: 0 where no token was sampled
            np.where(item.rollout.sampled, item.rollout.logprobs - logprobs, np.float32(0))
            for item, logprobs in zip(items, start, strict=True)
        ]
        sampled = sum(int(item.rollout.sampled.sum()) for item in items)
        mean = float(sum(gap.sum(dtype=np.float64) for gap in gaps)) / sampled
        return [self._penalized(item, gap, mean) for item, gap in zip(items, gaps, strict=True)], mean

    def _penalized(self, item: WeightedRollout, gap: FloatArray, mean: float) -> WeightedRollout:
        sampled = item.rollout.sampled
        reward = np.where(sampled, self._coef * (mean - gap), 0.0)
        if self._discount:
            reward = discounted_future_sum_vectorized(torch.from_numpy(reward), self._discount).numpy()
        added = np.where(sampled, reward, 0.0).astype(np.float32)
        return WeightedRollout(item.rollout, item.advantages + added)
