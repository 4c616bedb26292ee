"""The gradient side of GRPO: groups of rollouts in, one update of the weights out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import tinker

from tinkerscript.config import TrainingConfig
from tinkerscript.engine.clients import TrainingClient
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.convert.tinker_datum import to_datum, to_scoring_datum
from tinkerscript.rollouts.convert.traits import TRAITS
from tinkerscript.rollouts.types import RolloutGroup, WeightedRollout
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel


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
    ) -> None:
        self._client = client
        self._config = config
        self._report = report
        self._check = AlignmentCheck(report, config, model)
        self._seed = seed

    async def update(
        self, groups: Sequence[RolloutGroup], *, step: int, lags: Mapping[int, int] | None = None
    ) -> dict[str, float]:
        """One batch: compare log probabilities, then one optimizer step for each minibatch.

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
