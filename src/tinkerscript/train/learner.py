"""`Learner`: what a training step does to one policy's weights.

`AlignmentCheck` runs before the first optimizer step, so a step that it stops has changed nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import tinker
from tinker.types import LossFnType

from tinkerscript.config import TrainingConfig
from tinkerscript.engine.image_features import with_images
from tinkerscript.engine.losses import (
    CANDIDATES,
    CHOSEN_EXPERTS,
    CLIP,
    COVARIANT,
    MASK,
    SAMPLER,
    SCALE,
    START,
    TEACHER,
    TEMPERATURES,
)
from tinkerscript.errors import AlignmentError
from tinkerscript.ledger.rows import Use
from tinkerscript.rollouts.advantages import (
    PLAIN,
    AdvantageRule,
    Moments,
    Past,
    RolloutGroup,
    SampleMean,
    WeightedRollout,
    whitened,
)
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.alignment.report import explain
from tinkerscript.rollouts.call import FloatArray, calls_of
from tinkerscript.rollouts.credit import Credit
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import BoolArray, EpisodeRollouts, Rollout
from tinkerscript.rollouts.trainers import Numbers, packed_experts, to_scoring_datum, to_training_datum
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel
from tinkerscript.train.backends.backend import (
    SKIPPED,
    TrainerBackend,
    TrainingClient,
    optimizer_step,
)
from tinkerscript.train.defaults import learning_rate
from tinkerscript.train.off_policy import AcceptedGroup, ReplayBuffer
from tinkerscript.train.policy_loss import loss_config, policy_loss
from tinkerscript.train.token_advantages import (
    Distillation,
    KLPenalty,
    ReferenceLogprobs,
    correct,
    covariant_tokens,
    divergence,
    keep_top_entropy,
    length_cost,
    overlong_punishment,
    scored,
)
from tinkerscript.trainer_link.messages import EpisodeAccepted, scores_of

LossMean = Literal["sequences", "tokens", "tokens_then_sequences", "episodes"]

KL_STEP = "train/kl_step"
"""Metric: how far a step moves the weights before its last optimizer step, as KL(before, after) in nats per
token (Schulman's k3).
"""


@dataclass(frozen=True, slots=True)
class Compared:
    rollout: Rollout
    trainer_logprobs: FloatArray
    """float32 [T], before the update, [0] unused."""

    entropies: FloatArray | None
    """float32 [T], in nats, [0] unused; None if not reported."""


class LearnerState(msgspec.Struct, frozen=True):
    """The state that training keeps between steps, besides weights and replayed groups."""

    rewards: Moments = Moments()
    samples: dict[str, SampleMean] = {}
    """By `curriculum.key_of`."""

    entropy_weight: float = 0.0


@dataclass(eq=False)
class Learner:
    """A step is `take`, `check` and `train`."""

    client: TrainingClient
    config: TrainingConfig
    model: TrainedModel
    report: AlignmentReport
    seed: int
    role: str = ""
    start_logprobs: ReferenceLogprobs | None = None
    distillation: Distillation | None = None
    reply_tokens: int = 0
    state: LearnerState = field(default_factory=LearnerState)
    """For checkpoints. Changes only in `train`."""

    def __post_init__(self) -> None:
        config = self.config
        self.rule = AdvantageRule(
            config.advantage_baseline, config.advantage_scale, config.pass_k, config.reward_weights
        )
        if config.distillation.is_pure:
            # Rewards have weight 0, but a group of one needs an advantage to train.
            self.rule = PLAIN
        self.credit = Credit(config.credit.level, config.credit.discount)
        self.alignment = AlignmentCheck(self.report, config, self.model)

        self.replay = ReplayBuffer(config, seed=self.seed) if config.replay_uses > 1 else None
        self.groups: list[RolloutGroup] = []
        self.replayed: list[RolloutGroup] = []
        self.replayable: list[RolloutGroup] = []
        self.stale: dict[str, str] = {}

        self.compared: list[Compared] = []

        # Keys are `id(rollout)`.
        self.advantages: dict[int, FloatArray] = {}
        """float32 [T], before division by the loss mean."""

        self.corrected: dict[int, BoolArray] = {}
        """bool [T]: where `rollout_correction` or `top_entropy` removed the loss."""

        self._inputs: dict[int, dict[str, FloatArray]] = {}
        self._old: dict[int, FloatArray] = {}

        self._next_state = self.state
        self._batch: list[WeightedRollout] = []
        self._measured: dict[str, float] = {}

        # The comparison also computes the gradient of a single-step update, which the engine holds until
        # `train`.
        self._computed: tinker.ForwardBackwardOutput | None = None

        self._loss = loss = policy_loss(config)
        self._is_embedded = self.model.is_embedded
        self._loss_config = loss_config(config, loss)
        self._clips = CLIP.keys() <= loss.settings.keys()
        self._ratio_of_sequence = loss.ratio == "sequence"
        self._penalty: KLPenalty | None = None
        if config.kl_penalty_coef:
            assert self.start_logprobs is not None
            self._penalty = KLPenalty(self.start_logprobs, coef=config.kl_penalty_coef)

    async def check_loss(self, backend: TrainerBackend) -> None:
        await backend.check_loss(cast(LossFnType, self.config.loss_fn), self._loss_config or None)

    # Groups

    def take(
        self,
        groups: Iterable[AcceptedGroup],
        stale: Mapping[str, str] | None = None,
        samples: Mapping[str, str] | None = None,
    ) -> None:
        """Begin a step. A role takes only the episodes that called it.

        `stale`: uuid -> why only its reward counts. `samples`: group id -> sample's key, for `sample_mean`.
        """
        self.stale |= stale or {}
        self.report.begin_step()
        taken: list[RolloutGroup] = []
        for group_id, accepted in groups:
            episodes = [outcome for outcome in accepted if self.has_part_in(outcome)]
            if len(episodes) >= (self.config.min_group if self.role else 0):
                taken.append(RolloutGroup(group_id, tuple(map(self._merged, episodes))))
        if self.rule.uses_past:
            taken = self._with_past(taken, samples or {})
        for group in taken:
            for episode in group.episodes:
                if episode.episode_uuid not in self.stale:
                    self.report.add_episode(episode)
        self.begin(taken)

    def _with_past(self, groups: list[RolloutGroup], samples: Mapping[str, str]) -> list[RolloutGroup]:
        """Running moments include this step; a sample's mean does not."""
        rewards = self.state.rewards.adding([each for group in groups for each in group.rewards])
        means, found = dict(self.state.samples), list[RolloutGroup]()
        for group in groups:
            mean = rewards.mean
            if self.rule.baseline == "sample_mean":
                before = self.state.samples.get(key := samples[group.group_id])
                means[key] = means.get(key, SampleMean()).adding(group.rewards)
                mean = before.mean if before else mean
            found.append(replace(group, past=Past(mean, rewards.deviation)))
        self._next_state = msgspec.structs.replace(self.state, rewards=rewards, samples=means)
        return found

    def group_again(self, outcomes: Sequence[EpisodeAccepted]) -> RolloutGroup:
        return RolloutGroup(outcomes[0].group_id, tuple(map(self._merged, outcomes)))

    def has_part_in(self, outcome: EpisodeAccepted) -> bool:
        return not self.role or any(call.sampled for call in calls_of(outcome.all_calls, self.role))

    def _merged(self, outcome: EpisodeAccepted) -> EpisodeRollouts:
        if outcome.episode_uuid in self.stale:
            reward, scores = self._reward_of(outcome)
            return EpisodeRollouts(outcome.episode_uuid, reward, (), metadata=outcome.metadata, scores=scores)
        rollouts = merge_calls(
            outcome.all_calls,
            episode_uuid=outcome.episode_uuid,
            trains_constrained=self.config.constrained_tokens == "train",
            role=self.role,
        )
        calls = tuple(calls_of(outcome.all_calls, self.role))
        reward, scores = self._reward_of(outcome)
        return EpisodeRollouts(
            outcome.episode_uuid,
            reward,
            rollouts,
            calls,
            outcome.metadata,
            call_rewards={} if self.role else outcome.call_rewards,
            scores=scores,
        )

    def _reward_of(self, outcome: EpisodeAccepted) -> tuple[float, dict[str, float]]:
        calls = calls_of(outcome.all_calls, self.role)
        reward = outcome.reward_of(self.role) - length_cost(calls, self.config.length_penalty)
        if self.config.overlong_buffer:
            reward += overlong_punishment(calls, limit=self.reply_tokens, buffer=self.config.overlong_buffer)
        scores = scores_of(outcome)
        return reward, {name: scores[name] for name in self.config.reward_weights}

    def outcome_of(self, group: RolloutGroup, episode: EpisodeRollouts) -> str:
        if any(id(rollout) in self.advantages for rollout in episode.rollouts):
            return Use.TRAINED
        if any(id(rollout) in self.alignment.reasons for rollout in episode.rollouts):
            return Use.MISALIGNED
        if episode.episode_uuid in self.stale:
            return Use.STALE
        return Use.NOTHING_TO_TRAIN if self.trains(group) else Use.SAME_REWARD

    @property
    def used(self) -> list[RolloutGroup]:
        return [*self.replayable, *self.replayed]

    # A step

    def begin(self, groups: Sequence[RolloutGroup]) -> None:
        self.groups, self.replayed = list(groups), []
        self.replayable, self.compared, self.advantages, self.corrected = [], [], {}, {}
        self._batch, self._measured = [], {}
        self._inputs, self._old = {}, {}
        self.alignment.begin()

    async def check(
        self,
        *,
        step: int,
        lag_of_version: Mapping[int, int] | None = None,
        replayed: Sequence[RolloutGroup] = (),
    ) -> None:
        """Decide which sequences train, with which advantages. Changes no weights.

        `lag_of_version`: policy version -> training steps behind (None: all current). Raises AlignmentError
        if the batch is misaligned and `on_misalignment` is `stop`.
        """
        self.replayed = list(replayed)
        try:
            aligned = await self._check_groups(step, lag_of_version)
        except AlignmentError as error:
            await self.drop_gradients()
            if not self.role:
                raise
            raise AlignmentError(f"role {self.role}: {error}", name=error.name) from error
        if aligned and self._computed is None:
            self._batch, self._measured = await self._token_advantages(
                [item for item, _ in aligned], [logprobs for _, logprobs in aligned], step
            )
        self._measured = self._entropy() | self._measured if aligned else {}

    async def drop_gradients(self) -> None:
        if self._computed is not None:
            self._computed, self._batch, self._measured = None, [], {}
            await cast("Any", self.client).drop_gradients()

    async def _check_groups(
        self, step: int, lag_of_version: Mapping[int, int] | None
    ) -> list[tuple[WeightedRollout, FloatArray]]:
        sound = [*(self.alignment.sound(group) for group in self.groups), *self.replayed]
        weighted = self._weighted(sound)
        batch = [
            item for group, items in zip(sound, weighted, strict=True) if self.trains(group) for item in items
        ]
        # Compare one group even if nothing can train, so that every step measures the gap.
        compared = batch or next(filter(None, (list(group.weighted(PLAIN)) for group in sound)), [])
        aligned = await self._compare(compared, lag_of_version, step, trains=bool(batch))
        self.alignment.siblings(self.groups, step=step)
        self.replayable = [each for each in self.groups if self.trains(each) and self.alignment.passed(each)]
        return aligned if batch else []

    def trains(self, group: RolloutGroup) -> bool:
        return self.differs(group) or self.trains_equal

    def differs(self, group: RolloutGroup) -> bool:
        return self.credit.differs(group, self.rule)

    @property
    def trains_equal(self) -> bool:
        return (
            self.distillation is not None
            or self._penalty is not None
            or bool(self.config.kl_losses)
            or self.rule.spans_groups
        )

    def masks(self, rollout: Rollout) -> bool:
        return self.config.mask_truncated and rollout.is_truncated

    def _weighted(self, groups: Sequence[RolloutGroup]) -> list[list[WeightedRollout]]:
        weighted = [
            [
                item
                for item in self.credit.weighted(group, self.rule)
                if item.rollout.loss_mask.any() and not self.masks(item.rollout)
            ]
            for group in groups
        ]
        if self.rule.scale == "batch_deviation" and any(weighted):
            every = iter(whitened([item for items in weighted for item in items]))
            weighted = [[next(every) for _ in items] for items in weighted]
        if self.distillation is None:
            return weighted
        factor = self.distillation.reward_coef
        return [
            [item.scaled(factor if self.differs(group) or self.rule.spans_groups else 0.0) for item in items]
            for group, items in zip(groups, weighted, strict=True)
        ]

    async def _compare(
        self,
        items: list[WeightedRollout],
        lag_of_version: Mapping[int, int] | None,
        step: int,
        *,
        trains: bool,
    ) -> list[tuple[WeightedRollout, FloatArray]]:
        if not items:
            return []
        if self.config.rollout_correction.bypass:
            return [(item, item.rollout.logprobs) for item in items]
        if trains and self._takes_one_step(items):
            results = await self._forward_backward(items, step)
        else:
            datums = [
                with_images(to_scoring_datum(item.rollout, **self._more(item.rollout)), item.rollout.images)
                for item in items
            ]
            results = (await self.client.forward(datums, "cross_entropy")).loss_fn_outputs
        trainer = [_shifted(result["logprobs"]) for result in results]
        entropies = [_shifted(result["entropies"]) if "entropies" in result else None for result in results]
        self.compared = [
            Compared(item.rollout, logprobs, entropy)
            for item, logprobs, entropy in zip(items, trainer, entropies, strict=True)
        ]
        of = {id(item): logprobs for item, logprobs in zip(items, trainer, strict=True)}
        kept = self.alignment.compare(items, trainer, lags=lag_of_version, step=step)
        if len(kept) < len(items):
            await self.drop_gradients()
        return [(item, of[id(item)]) for item in kept]

    def _takes_one_step(self, items: Sequence[WeightedRollout]) -> bool:
        config = self.config
        return (
            self._is_embedded  # Services cannot drop a gradient.
            and not self.role
            and not config.rollout_correction.is_on
            and config.top_entropy == 1
            and not config.adaptive_entropy.target
            and COVARIANT not in self._loss.inputs
            and config.epochs_per_batch == 1
            and min(self._minibatches(items), len(items)) == 1
        )

    async def _forward_backward(
        self, items: list[WeightedRollout], step: int
    ) -> list[Mapping[str, tinker.TensorData]]:
        self._batch, self._measured = await self._token_advantages(items, [], step)
        (part,) = minibatches(self._batch, 1, seed=f"{self.seed}/{step}/0")
        output = await cast("Any", self.client).forward_backward(
            self._datums(part), self.config.loss_fn, self._loss_config or None, entropies=True
        )
        self._computed = output
        of = {id(item.rollout): row for item, row in zip(part, output.loss_fn_outputs, strict=True)}
        return [of[id(item.rollout)] for item in items]

    async def train(self, step: int) -> dict[str, float]:
        """Take one optimizer step per minibatch and epoch. Returns mean `train/` metrics."""
        adapted = self._adapt_entropy()
        self.state = self._next_state
        batch, self._batch = self._batch, []
        computed, self._computed = self._computed, None
        rate = learning_rate(self.config, step, steps=self.config.steps)
        metrics = {
            "train/sequences": float(len(batch)),
            "train/learning_rate": rate,
            **self._measured,
            **adapted,
        }
        if batch:
            self.advantages = {id(item.rollout): item.advantages for item in batch}
            for item in batch:
                self.report.add_trained(item.rollout)
            parts = [
                part
                for epoch in range(self.config.epochs_per_batch)
                for part in minibatches(batch, self._minibatches(batch), seed=f"{self.seed}/{step}/{epoch}")
            ]
            results = [await self._minibatch(part, rate, computed) for part in parts]
            if len(results) > 1 and (last := results[-1].get(KL_STEP)) is not None:
                metrics[KL_STEP] = last
            for result in results:
                result.pop(KL_STEP, None)
            for key in dict.fromkeys(key for result in results for key in result):
                found = [result[key] for result in results if key in result]
                metrics[key] = float(np.sum(found) if key == SKIPPED else np.mean(found))
        if self.replay is not None:
            self.replay.record(self.used)
            metrics |= self.replay.metrics(self.replayed)
        return metrics

    def _minibatches(self, batch: Sequence[WeightedRollout]) -> int:
        size = self.config.minibatch_size
        return max(1, len(batch) // size) if size else self.config.minibatches

    async def _token_advantages(
        self, batch: list[WeightedRollout], olds: Sequence[FloatArray], step: int
    ) -> tuple[list[WeightedRollout], dict[str, float]]:
        """Apply KL penalty, teacher and corrections. `olds`: trainer's logprobs, float32 [T], or empty."""
        self._old = {id(item.rollout): old for item, old in zip(batch, olds, strict=False)}
        metrics: dict[str, float] = {}
        if self._penalty is not None:
            batch, metrics["train/kl_start"] = await self._penalty.apply(batch)
        if self.distillation is not None:
            episodes = [each for group in (*self.groups, *self.replayed) for each in group.episodes]
            batch, metrics["distillation/teacher_kl"] = await self.distillation.apply(batch, episodes)
            for name, values in zip((CANDIDATES, TEACHER), self.distillation.candidates, strict=False):
                self._give(name, batch, values)
        before = batch
        if self.config.rollout_correction.is_on:
            batch, corrected = correct(batch, olds, self.config.rollout_correction)
            metrics |= corrected
        if self.config.top_entropy < 1:
            entropies = {id(each.rollout): each.entropies for each in self.compared}
            found = [entropies[id(item.rollout)] for item in batch]
            batch = keep_top_entropy(
                batch, [each for each in found if each is not None], self.config.top_entropy
            )
        if batch is not before:
            self.corrected = {
                id(item.rollout): (former.advantages != 0) & (item.advantages == 0)
                for former, item in zip(before, batch, strict=True)
            }
        if self.config.kl_losses or START in self._loss.inputs:
            assert self.start_logprobs is not None
            scores = await scored(self.start_logprobs, batch)
            metrics["train/kl_start"] = divergence(batch, scores)
            self._give(START, batch, scores)
        if COVARIANT in self._loss.inputs:
            settings = self._loss_config
            band = (settings["cov_low"], settings["cov_high"]) if "cov_low" in settings else None
            share, seed = settings["cov_share"], f"{self.seed}/{step}/covariant"
            self._give(COVARIANT, batch, covariant_tokens(batch, olds, share=share, band=band, seed=seed))
        if SAMPLER in self._loss.inputs or self._loss_config.get("off_policy_mask"):
            self._give(SAMPLER, batch, [item.rollout.logprobs for item in batch])
        return batch, metrics

    def _give(self, name: str, batch: Sequence[WeightedRollout], values: Sequence[FloatArray]) -> None:
        for item, value in zip(batch, values, strict=True):
            self._inputs.setdefault(id(item.rollout), {})[name] = value

    def _entropy(self) -> dict[str, float]:
        found = [
            each.entropies[each.rollout.loss_mask] for each in self.compared if each.entropies is not None
        ]
        return {"train/entropy": float(np.concatenate(found).mean())} if found else {}

    def _adapt_entropy(self) -> dict[str, float]:
        """Return this step's entropy bonus, and put the next one's into `_next_state`.

        docs/training.md#an-entropy-to-hold has the rule. The bound at 0 is TRL's.
        """
        target, delta = self.config.adaptive_entropy.target, self.config.adaptive_entropy.delta
        entropy = self._measured.get("train/entropy")
        if not target or entropy is None:
            return {}
        weight = self.state.entropy_weight
        moved = max(0.0, weight + delta * ((entropy < target) - (entropy > target)))
        self._next_state = msgspec.structs.replace(self._next_state, entropy_weight=moved)
        acting = weight if entropy <= target else 0.0
        self._loss_config = {**self._loss_config, "entropy": acting}
        return {"train/entropy_weight": acting}

    async def _minibatch(
        self, part: list[WeightedRollout], rate: float, computed: tinker.ForwardBackwardOutput | None
    ) -> dict[str, float]:
        stepped = await optimizer_step(
            self.client,
            [] if computed else self._datums(part),
            self.config,
            loss_fn=cast(LossFnType, self.config.loss_fn),
            loss_config=self._loss_config or None,
            learning_rate=rate,
            computed=computed,
        )
        moved = {} if computed else self._moved(part, stepped.logprobs)
        return stepped.metrics | self._clipped(part, stepped.logprobs) | moved

    def _datums(self, part: list[WeightedRollout]) -> list[tinker.Datum]:
        config = self.config
        of_step = config.groups_per_step * config.replay_uses * config.group_size
        planned = config.minibatch_size or of_step / config.minibatches
        counts = divisors(part, config.loss_mean, episodes=planned)
        return [self._datum(item, count) for item, count in zip(part, counts, strict=True)]

    def _datum(self, item: WeightedRollout, count: float) -> tinker.Datum:
        more = self._more(item.rollout)
        if self.config.loss_fn == "gspo" and not self._is_embedded:
            # Tinker's gspo sums over tokens where ours takes the mean.
            count *= max(1, int(item.rollout.loss_mask.sum()))
            more["sequence_ratio_mask"] = item.rollout.loss_mask.astype(np.float32)
        if self._is_embedded:
            tokens = max(1, int(item.rollout.loss_mask.sum())) if self._ratio_of_sequence else 1
            more[SCALE] = (item.rollout.loss_mask / (count * tokens)).astype(np.float32)
            more |= self._inputs.get(id(item.rollout), {})
        return with_images(to_training_datum(item.scaled(1 / count), **more), item.rollout.images)

    def _more(self, rollout: Rollout) -> dict[str, Numbers]:
        if not self._is_embedded:
            return {}
        more: dict[str, Numbers] = {
            MASK: rollout.loss_mask.astype(np.float32),
            TEMPERATURES: rollout.temperatures,
        }
        if self.model.routing is not None and rollout.experts is not None:
            more[CHOSEN_EXPERTS] = packed_experts(rollout.experts)
        return more

    def _clipped(self, part: Sequence[WeightedRollout], logprobs: Sequence[FloatArray]) -> dict[str, float]:
        if not self._clips or len(logprobs) < len(part):
            return {}
        gaps = [self._gaps(item, new) for item, new in zip(part, logprobs, strict=True)]
        ratios = np.exp(np.minimum(np.concatenate(gaps), 80))  # exp(80) is finite in float32.
        low, high = (self._loss_config[f"clip_{end}_threshold"] for end in ("low", "high"))
        return {"train/clip_fraction": float(((ratios < low) | (ratios > high)).mean())}

    def _moved(self, part: Sequence[WeightedRollout], logprobs: Sequence[FloatArray]) -> dict[str, float]:
        if len(logprobs) < len(part):
            return {}
        gaps = np.concatenate(
            [
                (new - self._old[id(item.rollout)][1:])[item.rollout.loss_mask[1:]]
                for item, new in zip(part, logprobs, strict=True)
            ]
        ).clip(-20, 20)
        return {KL_STEP: float((np.exp(gaps) - 1 - gaps).mean(dtype=np.float64))}

    def _gaps(self, item: WeightedRollout, new: FloatArray) -> FloatArray:
        """`new`: float32 [T - 1]."""
        old = item.reference if item.reference is not None else item.rollout.logprobs
        mask = item.rollout.loss_mask[1:]
        gaps = (new - old[1:])[mask]
        return np.full_like(gaps, gaps.mean()) if self._ratio_of_sequence else gaps

    def summary(self) -> dict[str, Any]:
        return {
            "tokens_trained": self.report.tokens_trained,
            "max_abs_dlogp": self.report.max_abs_dlogp,
            "mean_abs_dlogp": self.report.whole.at_lag_0.mean_abs,
            "sequences_per_episode": self.report.sequences_per_episode,
            "alignment": explain(self.report),
        }


def _shifted(values: tinker.TensorData) -> FloatArray:
    """Align a datum's targets with its tokens: float32 [T] with 0 in front."""
    return np.concatenate([[0.0], values.to_numpy()]).astype(np.float32)


def minibatches(batch: Sequence[WeightedRollout], number: int, *, seed: str) -> list[list[WeightedRollout]]:
    """Shuffle and cut the batch into at most `number` nearly equal parts, independent of its order."""
    ordered = sorted(batch, key=lambda item: (item.rollout.tokens.tobytes(), item.advantages.tobytes()))
    random.Random(seed).shuffle(ordered)
    parts = np.array_split(range(len(ordered)), min(number, len(ordered)))
    return [[ordered[place] for place in part] for part in parts]


def divisors(part: Sequence[WeightedRollout], loss_mean: LossMean, *, episodes: float) -> Sequence[float]:
    """Divisor of each sequence's summed loss. `episodes`: planned per minibatch."""
    if loss_mean == "episodes":
        return [episodes] * len(part)
    tokens = [int(item.rollout.loss_mask.sum()) for item in part]
    if loss_mean == "tokens":
        return [sum(tokens)] * len(part)
    return [len(part) * count if loss_mean == "tokens_then_sequences" else len(part) for count in tokens]
