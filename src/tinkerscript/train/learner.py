"""`Learner`: the gradient side of GRPO. One `update` is check, advantages, compare, loss, optimizer step.

Invariants: `AlignmentCheck` runs before the step's first gradient, so a step that it stops has changed no
weights, and nothing trains that it has not passed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
import tinker
from tinker.types import LossFnType

from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.losses import CLIP, Loss, resolve_loss
from tinkerscript.errors import ConfigError, EngineRequestError
from tinkerscript.rollouts.advantages import PLAIN, AdvantageRule, RolloutGroup, WeightedRollout
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.convert.tinker_datum import to_scoring_datum, to_training_datum
from tinkerscript.rollouts.rollout import BoolArray, Rollout
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel
from tinkerscript.train.backends.backend import (
    LossTerm,
    TrainerBackend,
    TrainingClient,
    learning_rate,
    optimizer_step,
)
from tinkerscript.train.distillation import Distillation
from tinkerscript.train.kl_penalty import KLPenalty, ReferenceLogprobs
from tinkerscript.train.rollout_correction import correct

LossMean = Literal["sequences", "tokens", "tokens_then_sequences"]

DATUM_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
"""What `to_training_datum` gives a loss."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What an update found for one sequence of T tokens."""

    rollout: Rollout
    trainer_logprobs: FloatArray
    """float32 [T], [0] unused: before the update."""

    entropies: FloatArray | None
    """float32 [T], [0] unused: of the trainer's distributions, in nats; None if the backend gives none."""


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
        start_logprobs: ReferenceLogprobs | None = None,
        distillation: Distillation | None = None,
    ) -> None:
        """`start_logprobs` is needed for `kl_penalty_coef`. Raises ConfigError for an unknown `loss_fn`."""
        self.rule = AdvantageRule(config.advantage_baseline, config.advantage_scale)
        if config.distillation.is_pure:
            self.rule = PLAIN  # It is weighed with 0, and has to be there for a group of one.
        self._distillation = distillation
        self._client = client
        self._config = config
        self._report = report
        self._check = AlignmentCheck(report, config, model)
        self._seed = seed
        self.trained: list[RolloutGroup] = []
        """The new groups of the last update that carry a gradient and have no sequence with an error."""

        self.compared: list[Compared] = []
        """The sequences that the last update compared."""

        self.advantages: dict[int, FloatArray] = {}
        """By `id` of the rollouts that the last update trained on: float32 [T], as the loss had them but for
        the mean."""

        self.corrected: dict[int, BoolArray] = {}
        """By `id` of those rollouts: bool [T], True where `rollout_correction` took the loss away."""

        self._aligned: list[tuple[WeightedRollout, FloatArray]] = []
        """What `check_step` has passed, each with the trainer's log probabilities, float32 [T]."""

        loss = policy_loss(config)
        self._loss_config = _loss_config(config, loss)
        self._clips = CLIP.keys() <= loss.settings.keys()
        self._ratio_of_sequence = loss.ratio == "sequence"
        self._penalty: KLPenalty | None = None
        if config.kl_penalty_coef:
            assert start_logprobs is not None
            self._penalty = KLPenalty(
                start_logprobs, coef=config.kl_penalty_coef, discount=config.kl_discount_factor
            )

    async def check_loss(self, backend: TrainerBackend) -> None:
        """Raise EngineError if `backend` cannot train with the run's loss."""
        await backend.check_loss(cast(LossFnType, self._config.loss_fn), self._loss_config or None)

    async def update(
        self,
        groups: Sequence[RolloutGroup],
        *,
        step: int,
        lags: Mapping[int, int] | None = None,
        replayed: Sequence[RolloutGroup] = (),
    ) -> dict[str, float]:
        """One training step on a batch of groups: `check_step`, then `train`."""
        await self.check_step(groups, step=step, lags=lags, replayed=replayed)
        return await self.train(step)

    async def check_step(
        self,
        groups: Sequence[RolloutGroup],
        *,
        step: int,
        lags: Mapping[int, int] | None = None,
        replayed: Sequence[RolloutGroup] = (),
    ) -> None:
        """Decide what of a batch of groups `train` will train on. Changes no weights.

        `lags`: training steps that each policy version is behind the current weights; None: all are current.
        `replayed`: groups of earlier steps (`trained` then) to train on again. Raises AlignmentError if the
        batch is misaligned and the config says to stop then.
        """
        # Check each sequence by itself: ids, masks, temperature.
        self._check.begin()
        self.trained, self.compared, self.advantages, self.corrected = [], [], {}, {}
        self._aligned = []
        sound = [*(self._check.sound(group) for group in groups), *replayed]
        # Advantages. Without a teacher a group whose rewards are all equal carries no gradient; a masked
        # sequence never does.
        weighted = [self._weighted(group) for group in sound]
        batch = [
            item
            for group, items in zip(sound, weighted, strict=True)
            if self.trains(group)
            for item in items
            if item.rollout.loss_mask.any()
        ]
        # Compare the sampler's log probabilities with the trainer's; if nothing is trainable, of one group.
        compared = batch or next((items for items in weighted if items), [])
        aligned = await self._compare(compared, lags, step)
        self._check.siblings(groups, step=step)
        self.trained = [group for group in groups if self.trains(group) and self._check.passed(group)]
        self._aligned = aligned if batch else []

    async def train(self, step: int) -> dict[str, float]:
        """The loss and the optimizer steps on what `check_step` has passed; returns `train/` metrics."""
        metrics = {"train/sequences": 0.0, "train/learning_rate": self.learning_rate(step)}
        aligned, self._aligned = self._aligned, []
        if aligned:
            metrics |= await self._train(aligned, step)
        return metrics

    def trains(self, group: RolloutGroup) -> bool:
        """Whether the group carries a gradient: its rewards differ, or a teacher scores it."""
        return group.rewards_differ or self._distillation is not None

    def _weighted(self, group: RolloutGroup) -> list[WeightedRollout]:
        """Its sequences with the advantages that the task gives them."""
        items = list(group.weighted(self.rule))
        if self._distillation is None:
            return items
        factor = self._distillation.reward_coef if group.rewards_differ else 0.0
        return [item.scaled(factor) for item in items]

    async def _compare(
        self, items: list[WeightedRollout], lags: Mapping[int, int] | None, step: int
    ) -> list[tuple[WeightedRollout, FloatArray]]:
        """The sequences whose logprobs the trainer reproduces, each with the trainer's logprobs (float32 [T])
        before any update of this step."""
        if not items:
            return []
        datums = [to_scoring_datum(item.rollout) for item in items]
        output = await self._client.forward(datums, "cross_entropy")
        trainer = [_shifted(result["logprobs"]) for result in output.loss_fn_outputs]
        entropies = [
            _shifted(result["entropies"]) if "entropies" in result else None
            for result in output.loss_fn_outputs
        ]
        self.compared = [
            Compared(item.rollout, logprobs, entropy)
            for item, logprobs, entropy in zip(items, trainer, entropies, strict=True)
        ]
        of = {id(item): logprobs for item, logprobs in zip(items, trainer, strict=True)}
        return [(item, of[id(item)]) for item in self._check.compare(items, trainer, lags=lags, step=step)]

    async def _train(self, aligned: list[tuple[WeightedRollout, FloatArray]], step: int) -> dict[str, float]:
        """One optimizer step for each minibatch of each epoch; metrics are means over them."""
        batch = [item for item, _ in aligned]
        metrics = {"train/sequences": float(len(batch))}
        for item in batch:
            self._report.add_trained(item.rollout)
        metrics |= self._entropy()
        if self._penalty is not None:
            batch, metrics["train/kl_start"] = await self._penalty.apply(batch)
        if self._distillation is not None:
            batch, metrics["distillation/teacher_kl"] = await self._distillation.apply(batch)
        if self._config.rollout_correction.method != "none":
            before = batch
            batch, corrected = correct(batch, [old for _, old in aligned], self._config.rollout_correction)
            metrics |= corrected
            self.corrected = {
                id(item.rollout): (former.advantages != 0) & (item.advantages == 0)
                for former, item in zip(before, batch, strict=True)
            }
        self.advantages = {id(item.rollout): self._shown(item) for item in batch}
        parts = [
            part
            for epoch in range(self._config.epochs_per_batch)
            for part in minibatches(batch, self._config.minibatches, seed=f"{self._seed}/{step}/{epoch}")
        ]
        results = [await self._minibatch(part, step) for part in parts]
        for key in results[0]:
            metrics[key] = float(np.mean([result[key] for result in results]))
        return metrics

    def _entropy(self) -> dict[str, float]:
        """`train/entropy`: the mean over the compared tokens that carry loss, in nats."""
        found = [
            each.entropies[each.rollout.loss_mask] for each in self.compared if each.entropies is not None
        ]
        return {"train/entropy": float(np.concatenate(found).mean())} if found else {}

    async def _minibatch(self, part: list[WeightedRollout], step: int) -> dict[str, float]:
        """One optimizer step. The loss is a sum over tokens, divided as `loss_mean` says."""
        first, *further = self._terms(part)
        stepped = await optimizer_step(
            self._client,
            first.datums,
            self._config,
            loss_fn=first.loss_fn,
            loss_config=first.loss_config,
            learning_rate=self.learning_rate(step),
            further=further[0] if further else None,
        )
        clipped = first.loss_fn == self._config.loss_fn
        return stepped.metrics | (self._clipped(part, stepped.logprobs) if clipped else {})

    def _terms(self, part: list[WeightedRollout]) -> list[LossTerm]:
        """The policy-gradient loss, and the teacher's if it is a loss of its own."""
        counts = divisors(part, self._config.loss_mean)
        terms: list[LossTerm] = []
        teacher = self._distillation if self._distillation and self._distillation.is_loss else None
        if teacher is None or teacher.reward_coef or self._penalty is not None:
            datums = [
                to_training_datum(item.scaled(1 / count)) for item, count in zip(part, counts, strict=True)
            ]
            loss_fn = cast(LossFnType, self._config.loss_fn)
            terms.append(LossTerm(datums, loss_fn, self._loss_config or None))
        if teacher is not None:
            datums = [teacher.datum(item, count) for item, count in zip(part, counts, strict=True)]
            terms.append(LossTerm(datums, cast(LossFnType, "reverse_kl")))
        return terms

    def _shown(self, item: WeightedRollout) -> FloatArray:
        """What the losses make of the advantages, float32 [T]."""
        if self._distillation is None:
            return item.advantages
        return item.advantages + self._distillation.pull(item)

    def _clipped(self, part: Sequence[WeightedRollout], logprobs: Sequence[FloatArray]) -> dict[str, float]:
        """`train/clip_fraction`: the share of the loss's tokens whose probability ratio is clipped."""
        if not self._clips or len(logprobs) < len(part):
            return {}
        gaps = [self._gaps(item, new) for item, new in zip(part, logprobs, strict=True)]
        ratios = np.exp(np.minimum(np.concatenate(gaps), 80))  # Beyond any threshold, and a finite float32.
        low, high = (self._loss_config[f"clip_{end}_threshold"] for end in ("low", "high"))
        return {"train/clip_fraction": float(((ratios < low) | (ratios > high)).mean())}

    def _gaps(self, item: WeightedRollout, new: FloatArray) -> FloatArray:
        """The logarithm of the ratio that the loss has for each token that carries loss. `new`: float32
        [T - 1]."""
        old = item.reference if item.reference is not None else item.rollout.logprobs
        mask = item.rollout.loss_mask[1:]
        gaps = (new - old[1:])[mask]
        if not self._ratio_of_sequence:
            return gaps
        trains = item.advantages[1:][mask] != 0  # As in the loss: what has no advantage has no say.
        return np.full_like(gaps, gaps[trains].mean() if trains.any() else 0.0)

    def learning_rate(self, step: int) -> float:
        """The learning rate of `step`, which counts from 1."""
        return learning_rate(self._config, step, steps=self._config.steps)

    @property
    def check(self) -> AlignmentCheck:
        """What decided which sequences of the last update may train."""
        return self._check

    async def save_checkpoint(self, name: str) -> None:
        """Write weights and optimizer state durably, under `name`."""
        await self._client.save_state(name)


def _shifted(values: tinker.TensorData) -> FloatArray:
    """float32 [T] of the T - 1 values of a datum's targets: position t is about token t, 0 has none."""
    return np.concatenate([[0.0], values.to_numpy()]).astype(np.float32)


def minibatches(batch: Sequence[WeightedRollout], number: int, *, seed: str) -> list[list[WeightedRollout]]:
    """The batch shuffled and cut into `number` parts, fewer if it has fewer sequences.

    The parts depend on the seed and on the batch's content, not on its order: a step trains the same if its
    episodes end in another order, or if it is repeated after a restart.
    """
    ordered = sorted(batch, key=lambda item: (item.rollout.tokens.tobytes(), item.advantages.tobytes()))
    random.Random(seed).shuffle(ordered)
    size = -(-len(ordered) // number)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def divisors(part: Sequence[WeightedRollout], loss_mean: LossMean) -> list[int]:
    """What the token losses of each sequence of a minibatch are divided by."""
    tokens = [int(item.rollout.loss_mask.sum()) for item in part]
    if loss_mean == "tokens":
        return [sum(tokens)] * len(part)
    return [len(part) * count if loss_mean == "tokens_then_sequences" else len(part) for count in tokens]


# The loss


def policy_loss(config: TrainingConfig) -> Loss:
    """The loss that `loss_fn` names. Raises ConfigError if it is unknown or is not a policy-gradient loss."""
    try:
        loss = resolve_loss(config.loss_fn)
    except EngineRequestError as error:
        raise ConfigError(f"training.loss_fn: {error}") from error
    if loss.inputs != DATUM_INPUTS:
        raise ConfigError(
            f"training.loss_fn: {config.loss_fn!r} takes {', '.join(sorted(loss.inputs))}; a policy-gradient "
            f"loss, such as ppo, takes {', '.join(sorted(DATUM_INPUTS))}"
        )
    if unknown := config.loss_config.keys() - loss.settings.keys():
        raise ConfigError(
            f"training.loss_config: {config.loss_fn!r} has no setting {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(loss.settings)) or 'none (a function of your own needs a Loss around it)'}"
        )
    return loss


def check_loss(config: RunConfig) -> None:
    """Raises ConfigError if the run's backend cannot train with `training.loss_fn`."""
    policy_loss(config.training)
    if config.engine.backend == "tinker" and config.training.loss_fn not in get_args(LossFnType):
        raise ConfigError(
            f"training.loss_fn: {config.training.loss_fn!r} needs the embedded engine; a service behind "
            "Tinker's protocol knows only its own losses"
        )


def _loss_config(config: TrainingConfig, loss: Loss) -> dict[str, float]:
    """`loss_fn_config`: the clip thresholds if the loss has them, and `loss_config`."""
    clip = {"clip_low_threshold": 1 - config.clip_low, "clip_high_threshold": 1 + config.clip_high}
    return {key: value for key, value in clip.items() if key in loss.settings} | config.loss_config
