"""The gradient side of GRPO: groups of rollouts in, one update of the weights out."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence

import numpy as np
import tinker

from tinkerscript.config import TrainingConfig
from tinkerscript.engine.clients import TrainingClient
from tinkerscript.rollouts.alignment import AlignmentReport, find_errors
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.convert.tinker_datum import to_datum, to_scoring_datum
from tinkerscript.rollouts.convert.traits import TRAITS
from tinkerscript.rollouts.types import RolloutGroup, WeightedRollout


class Learner:
    """Turns groups into minibatches, checks alignment, and steps the optimizer."""

    def __init__(
        self,
        client: TrainingClient,
        config: TrainingConfig,
        *,
        vocabulary: int,
        report: AlignmentReport,
        seed: int,
    ) -> None:
        self._client = client
        self._config = config
        self._vocabulary = vocabulary
        self._report = report
        self._seed = seed

    async def update(
        self, groups: Sequence[RolloutGroup], *, step: int, current: Container[int] | None = None
    ) -> dict[str, float]:
        """One batch: compare log probabilities, then one optimizer step for each minibatch.

        `current`: the policy versions of the weights as they are before this step; None for all.
        """
        batch = [weighted for group in groups if group.rewards_differ for weighted in self._weigh(group)]
        metrics = {"train/sequences": float(len(batch)), "train/learning_rate": self.learning_rate(step)}
        if not batch:
            return metrics
        metrics |= await self._compare(batch, current)
        random.Random(f"{self._seed}/{step}").shuffle(batch)  # The same for a step that is made again.
        size = -(-len(batch) // self._config.minibatches)
        parts = [batch[i : i + size] for i in range(0, len(batch), size)]
        results = [await self._minibatch(part, step) for part in parts]
        for key in results[0]:
            metrics[key] = float(np.mean([result[key] for result in results]))
        return metrics

    async def save_checkpoint(self, name: str) -> None:
        """Weights and optimizer state, durably, under `name`."""
        await self._client.save_state(name)

    def learning_rate(self, step: int) -> float:
        """The rate of a step, from 1: constant, or linear down to a tenth."""
        config = self._config
        if config.lr_schedule == "constant":
            return config.learning_rate
        return config.learning_rate * max(0.1, 1 - (step - 1) / max(1, config.steps))

    def _weigh(self, group: RolloutGroup) -> list[WeightedRollout]:
        weighted: list[WeightedRollout] = []
        for item in group.weighted():
            errors = find_errors(item.rollout, vocabulary=self._vocabulary)
            self._report.add_errors(errors)
            if not errors:
                weighted.append(item)
        return weighted

    async def _compare(
        self, batch: list[WeightedRollout], current: Container[int] | None
    ) -> dict[str, float]:
        """The trainer's log probabilities before any update of this step, against the sampler's.

        Those of older weights (not in `current`) differ for a good reason, and are measured apart.
        """
        datums = [to_scoring_datum(item.rollout) for item in batch]
        output = await self._client.forward(datums, "cross_entropy")
        gaps: list[float] = []
        lagged: list[float] = []
        for item, result in zip(batch, output.loss_fn_outputs, strict=True):
            ours: FloatArray = np.concatenate([[0.0], result["logprobs"].to_numpy()]).astype(np.float32)
            is_current = current is None or all(v in current for v in item.rollout.policy_versions)
            gap = self._report.add_trained(item.rollout, ours, at_lag_0=is_current)
            (gaps if is_current else lagged).append(gap)
        named = {"alignment/max_abs_dlogp": gaps, "alignment/max_abs_dlogp_lagged": lagged}
        return {name: max(values) for name, values in named.items() if values}

    async def _minibatch(self, part: list[WeightedRollout], step: int) -> dict[str, float]:
        """Advantages are divided by the number of sequences, so that the gradient is their mean."""
        config = self._config
        datums = [to_datum(item.scaled(1 / len(part)), allow=TRAITS) for item in part]
        clip = {"clip_low_threshold": 1 - config.clip_low, "clip_high_threshold": 1 + config.clip_high}
        loss_config = None if config.loss_fn == "importance_sampling" else clip
        forward = self._client.forward_backward(datums, config.loss_fn, loss_config)
        optim = self._client.optim_step(self._adam(step))
        output, stepped = await forward, await optim
        return {
            "train/loss": output.metrics["loss:sum"],
            "train/grad_norm": (stepped.metrics or {})["grad_norm"],
        }

    def _adam(self, step: int) -> tinker.AdamParams:
        config = self._config
        return tinker.AdamParams(
            learning_rate=self.learning_rate(step),
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )
