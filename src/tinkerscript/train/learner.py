"""`Learner`: what a training step does to one policy's weights.

It checks what was sampled, turns rewards into advantages, compares its own log probabilities with the
sampler's, and takes the optimizer steps. Where there is one of these, the forward pass of the comparison is
its own, and its gradient waits. Invariant: `AlignmentCheck` runs before the first optimizer step, so a step
that it stops has changed no weights, and nothing trains that it has not passed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import tinker
from tinker.types import LossFnType

from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.losses import CLIP, MASK, TEMPERATURES, Loss, resolve_loss
from tinkerscript.errors import AlignmentError, ConfigError, EngineRequestError
from tinkerscript.ledger.rows import Use
from tinkerscript.rollouts.advantages import PLAIN, AdvantageRule, RolloutGroup, WeightedRollout
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.alignment.report import explain
from tinkerscript.rollouts.call import FloatArray, calls_of
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import BoolArray, EpisodeRollouts, Rollout
from tinkerscript.rollouts.trainers import to_scoring_datum, to_training_datum
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel
from tinkerscript.train.backends.backend import (
    SKIPPED,
    TrainerBackend,
    TrainingClient,
    optimizer_step,
)
from tinkerscript.train.defaults import learning_rate
from tinkerscript.train.off_policy import AcceptedGroup, ReplayBuffer
from tinkerscript.train.token_advantages import Distillation, KLPenalty, ReferenceLogprobs, correct
from tinkerscript.trainer_link.messages import EpisodeAccepted

LossMean = Literal["sequences", "tokens", "tokens_then_sequences", "episodes"]

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


@dataclass(eq=False)
class Learner:
    """Trains one policy of a run: the run's own, or that of a role.

    A step is `take` (episodes become groups of rollouts), `check` and `train`. A role's learner merges the
    calls of its role and no others, and has its own rewards, optimizer, replay buffer and report.
    """

    client: TrainingClient
    config: TrainingConfig
    model: TrainedModel
    report: AlignmentReport
    seed: int
    role: str = ""
    """Empty for the run's own policy."""

    start_logprobs: ReferenceLogprobs | None = None
    """Needed for `kl_penalty_coef`."""

    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for an unknown `loss_fn`."""
        self.rule = AdvantageRule(self.config.advantage_baseline, self.config.advantage_scale)
        if self.config.distillation.is_pure:
            self.rule = PLAIN  # Its weight is 0; a group of one still needs some advantage.
        self.alignment = AlignmentCheck(self.report, self.config, self.model)
        """Decides which sequences may train."""

        self.replay = ReplayBuffer(self.config, seed=self.seed) if self.config.replay_uses > 1 else None
        self.groups: list[RolloutGroup] = []
        """The step's own groups."""

        self.replayed: list[RolloutGroup] = []
        """Groups of earlier steps that it trains on again."""

        self.replayable: list[RolloutGroup] = []
        """The step's own groups that carry a gradient and have no sequence with an error."""

        self.stale: dict[str, str] = {}
        """Uuid of each episode that is in its group to be compared with and too old to train -> why."""

        self.compared: list[Compared] = []
        """The sequences that the last step compared."""

        self.advantages: dict[int, FloatArray] = {}
        """By `id` of the rollouts that the last step trained on: float32 [T], as the loss had them but for
        the mean."""

        self.corrected: dict[int, BoolArray] = {}
        """By `id` of those rollouts: bool [T], True where `rollout_correction` took the loss away."""

        self._batch: list[WeightedRollout] = []
        """What `check` has passed, as the loss gets it but for the mean."""

        self._measured: dict[str, float] = {}
        """`check`'s metrics of it."""

        self._computed: tinker.ForwardBackwardOutput | None = None
        """What `forward_backward` of the batch answered, whose gradient waits for the optimizer step."""

        loss = policy_loss(self.config)
        self._is_embedded = self.model.is_embedded
        self._loss_config = _loss_config(self.config, loss)
        self._clips = CLIP.keys() <= loss.settings.keys()
        self._ratio_of_sequence = loss.ratio == "sequence"
        self._penalty: KLPenalty | None = None
        if self.config.kl_penalty_coef:
            assert self.start_logprobs is not None
            self._penalty = KLPenalty(self.start_logprobs, coef=self.config.kl_penalty_coef)

    async def check_loss(self, backend: TrainerBackend) -> None:
        """Raise EngineError if `backend` cannot train with the run's loss."""
        await backend.check_loss(cast(LossFnType, self.config.loss_fn), self._loss_config or None)

    # Groups

    def take(self, groups: Iterable[AcceptedGroup], stale: Mapping[str, str] | None = None) -> None:
        """Begin a step: merge its episodes. A role's groups have those that called it, if they are enough.

        `stale`: uuid of each episode that is too old -> why. Its reward counts, and it has no sequences.
        """
        self.stale |= stale or {}
        self.report.begin_step()
        taken: list[RolloutGroup] = []
        for group_id, accepted in groups:
            episodes = [outcome for outcome in accepted if self.has_part_in(outcome)]
            if len(episodes) >= (self.config.min_group if self.role else 0):
                taken.append(RolloutGroup(group_id, tuple(map(self._merged, episodes))))
        for group in taken:
            for episode in group.episodes:
                if episode.episode_uuid not in self.stale:
                    self.report.add_episode(episode)
        self.begin(taken)

    def group_again(self, outcomes: Sequence[EpisodeAccepted]) -> RolloutGroup:
        """A group that an earlier step trained on."""
        return RolloutGroup(outcomes[0].group_id, tuple(map(self._merged, outcomes)))

    def has_part_in(self, outcome: EpisodeAccepted) -> bool:
        """Whether an episode counts for the policy's groups. The run's own policy is in every one."""
        return not self.role or any(call.sampled for call in calls_of(outcome.all_calls, self.role))

    def _merged(self, outcome: EpisodeAccepted) -> EpisodeRollouts:
        if outcome.episode_uuid in self.stale:
            reward = outcome.reward_of(self.role)
            return EpisodeRollouts(outcome.episode_uuid, reward, (), metadata=outcome.metadata)
        rollouts = merge_calls(
            outcome.all_calls,
            episode_uuid=outcome.episode_uuid,
            trains_constrained=self.config.constrained_tokens == "train",
            role=self.role,
        )
        calls = tuple(calls_of(outcome.all_calls, self.role))
        return EpisodeRollouts(
            outcome.episode_uuid, outcome.reward_of(self.role), rollouts, calls, outcome.metadata
        )

    def outcome_of(self, group: RolloutGroup, episode: EpisodeRollouts) -> str:
        """What the last step did with an episode of its groups: `TrainedRow.outcome`."""
        if any(id(rollout) in self.advantages for rollout in episode.rollouts):
            return Use.TRAINED
        if any(id(rollout) in self.alignment.reasons for rollout in episode.rollouts):
            return Use.MISALIGNED
        if episode.episode_uuid in self.stale:
            return Use.STALE
        return Use.NOTHING_TO_TRAIN if self.trains(group) else Use.SAME_REWARD

    @property
    def used(self) -> list[RolloutGroup]:
        """The groups whose gradients the step used."""
        return [*self.replayable, *self.replayed]

    # A step

    def begin(self, groups: Sequence[RolloutGroup]) -> None:
        """Begin a step on these groups, and forget the last one."""
        self.groups, self.replayed = list(groups), []
        self.replayable, self.compared, self.advantages, self.corrected = [], [], {}, {}
        self._batch, self._measured = [], {}
        self.alignment.begin()

    async def check(
        self,
        *,
        step: int,
        lag_of_version: Mapping[int, int] | None = None,
        replayed: Sequence[RolloutGroup] = (),
    ) -> None:
        """Decide what of the step's groups `train` will train on, and with which advantages. Changes no
        weights.

        `lag_of_version`: training steps that each policy version is behind the current weights; None: all are
        current. `replayed`: groups of earlier steps (`replayable` then) to train on again. Raises
        AlignmentError if the batch is misaligned and the config says to stop then.
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
                [item for item, _ in aligned], [logprobs for _, logprobs in aligned]
            )
        self._measured = self._entropy() | self._measured if aligned else {}

    async def drop_gradients(self) -> None:
        """Forget the gradient that waits for `train`, if one does."""
        if self._computed is not None:
            self._computed, self._batch, self._measured = None, [], {}
            await cast("Any", self.client).drop_gradients()

    async def _check_groups(
        self, step: int, lag_of_version: Mapping[int, int] | None
    ) -> list[tuple[WeightedRollout, FloatArray]]:
        """The sequences that train, each with the trainer's log probabilities, float32 [T]."""
        # Check each sequence by itself: ids, masks, temperature.
        sound = [*(self.alignment.sound(group) for group in self.groups), *self.replayed]
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
        aligned = await self._compare(compared, lag_of_version, step, trains=bool(batch))
        self.alignment.siblings(self.groups, step=step)
        self.replayable = [each for each in self.groups if self.trains(each) and self.alignment.passed(each)]
        return aligned if batch else []

    def trains(self, group: RolloutGroup) -> bool:
        """Whether it carries a gradient."""
        return group.rewards_differ or self.trains_equal

    @property
    def trains_equal(self) -> bool:
        """Whether a teacher or the KL penalty gives groups a gradient whose rewards are all equal."""
        return self.distillation is not None or self._penalty is not None

    def _weighted(self, group: RolloutGroup) -> list[WeightedRollout]:
        """Its sequences with the advantages that the task gives them."""
        items = list(group.weighted(self.rule))
        if self.distillation is None:
            return items
        factor = self.distillation.reward_coef if group.rewards_differ else 0.0
        return [item.scaled(factor) for item in items]

    async def _compare(
        self,
        items: list[WeightedRollout],
        lag_of_version: Mapping[int, int] | None,
        step: int,
        *,
        trains: bool,
    ) -> list[tuple[WeightedRollout, FloatArray]]:
        """The sequences whose logprobs the trainer reproduces, each with the trainer's logprobs (float32 [T])
        before any update of this step. `trains`: whether a gradient of them is wanted."""
        if not items:
            return []
        if trains and self._takes_one_step(items):
            results = await self._forward_backward(items, step)
        else:
            datums = [to_scoring_datum(item.rollout, **self._more(item.rollout)) for item in items]
            results = (await self.client.forward(datums, "cross_entropy")).loss_fn_outputs
        trainer = [_shifted(result["logprobs"]) for result in results]
        entropies = [_shifted(result["entropies"]) if "entropies" in result else None for result in results]
        self.compared = [
            Compared(item.rollout, logprobs, entropy)
            for item, logprobs, entropy in zip(items, trainer, entropies, strict=True)
        ]
        of = {id(item): logprobs for item, logprobs in zip(items, trainer, strict=True)}
        kept = self.alignment.compare(items, trainer, lags=lag_of_version, step=step)
        if len(kept) < len(items):  # The gradient is that of sequences that must not train, too.
            await self.drop_gradients()
        return [(item, of[id(item)]) for item in kept]

    def _takes_one_step(self, items: Sequence[WeightedRollout]) -> bool:
        """Whether the loss of all `items` can be computed before they are compared, in one pass."""
        config = self.config
        return (
            self._is_embedded  # What cannot drop a gradient again must not compute it.
            and not self.role  # One policy's gradient is held while others are checked.
            and config.rollout_correction.method == "none"
            and config.epochs_per_batch == 1
            and min(self._minibatches(items), len(items)) == 1
        )

    async def _forward_backward(
        self, items: list[WeightedRollout], step: int
    ) -> list[Mapping[str, tinker.TensorData]]:
        """What the forward pass of the only optimizer step says of each item; its gradient waits."""
        self._batch, self._measured = await self._token_advantages(items, [])
        (part,) = minibatches(self._batch, 1, seed=f"{self.seed}/{step}/0")
        output = await cast("Any", self.client).forward_backward(
            self._datums(part), self.config.loss_fn, self._loss_config or None, entropies=True
        )
        self._computed = output
        of = {id(item.rollout): row for item, row in zip(part, output.loss_fn_outputs, strict=True)}
        return [of[id(item.rollout)] for item in items]

    async def train(self, step: int) -> dict[str, float]:
        """One optimizer step for each minibatch of each epoch, on what `check` has passed.

        Returns `train/` metrics, which are means over the optimizer steps.
        """
        batch, self._batch = self._batch, []
        computed, self._computed = self._computed, None
        rate = learning_rate(self.config, step, steps=self.config.steps)
        metrics = {
            "train/sequences": float(len(batch)),
            "train/learning_rate": rate,
            **self._measured,
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
        self, batch: list[WeightedRollout], trainer: Sequence[FloatArray]
    ) -> tuple[list[WeightedRollout], dict[str, float]]:
        """The sequences with the advantages that the loss gets: penalized, taught and corrected. `trainer`:
        its log probabilities, float32 [T] each, which only a correction needs."""
        metrics: dict[str, float] = {}
        if self._penalty is not None:
            batch, metrics["train/kl_start"] = await self._penalty.apply(batch)
        if self.distillation is not None:
            batch, metrics["distillation/teacher_kl"] = await self.distillation.apply(batch)
        if self.config.rollout_correction.method != "none":
            before = batch
            batch, corrected = correct(batch, trainer, self.config.rollout_correction)
            metrics |= corrected
            self.corrected = {
                id(item.rollout): (former.advantages != 0) & (item.advantages == 0)
                for former, item in zip(before, batch, strict=True)
            }
        return batch, metrics

    def _entropy(self) -> dict[str, float]:
        """`train/entropy`: the mean over the compared tokens that carry loss, in nats."""
        found = [
            each.entropies[each.rollout.loss_mask] for each in self.compared if each.entropies is not None
        ]
        return {"train/entropy": float(np.concatenate(found).mean())} if found else {}

    async def _minibatch(
        self, part: list[WeightedRollout], rate: float, computed: tinker.ForwardBackwardOutput | None
    ) -> dict[str, float]:
        """One optimizer step. `computed`: what `forward_backward` of `part` answered, if it has."""
        stepped = await optimizer_step(
            self.client,
            [] if computed else self._datums(part),
            self.config,
            loss_fn=cast(LossFnType, self.config.loss_fn),
            loss_config=self._loss_config or None,
            learning_rate=rate,
            computed=computed,
        )
        return stepped.metrics | self._clipped(part, stepped.logprobs)

    def _datums(self, part: list[WeightedRollout]) -> list[tinker.Datum]:
        """A minibatch for `loss_fn`. The loss is a sum over tokens, divided as `loss_mean` says."""
        config = self.config
        of_step = config.groups_per_step * config.replay_uses * config.group_size
        planned = config.minibatch_size or of_step / config.minibatches
        counts = divisors(part, config.loss_mean, episodes=planned)
        return [self._datum(item, count) for item, count in zip(part, counts, strict=True)]

    def _datum(self, item: WeightedRollout, count: float) -> tinker.Datum:
        """A sequence for `loss_fn`, divided by `count`."""
        more = self._more(item.rollout)
        if self.config.loss_fn == "gspo" and not self._is_embedded:
            # Tinker's gspo sums over the tokens whose mean ours takes.
            count *= max(1, int(item.rollout.loss_mask.sum()))
            more["sequence_ratio_mask"] = item.rollout.loss_mask.astype(np.float32)
        return to_training_datum(item.scaled(1 / count), **more)

    def _more(self, rollout: Rollout) -> dict[str, FloatArray]:
        """What the embedded engine takes beside the inputs of Tinker's losses."""
        if not self._is_embedded:
            return {}
        return {MASK: rollout.loss_mask.astype(np.float32), TEMPERATURES: rollout.temperatures}

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
        return np.full_like(gaps, gaps.mean()) if self._ratio_of_sequence else gaps

    def summary(self) -> dict[str, Any]:
        """A role's part of summary.json."""
        return {
            "tokens_trained": self.report.tokens_trained,
            "max_abs_dlogp": self.report.max_abs_dlogp,
            "mean_abs_dlogp": self.report.whole.at_lag_0.mean_abs,
            "sequences_per_episode": self.report.sequences_per_episode,
            "alignment": explain(self.report),
        }


def _shifted(values: tinker.TensorData) -> FloatArray:
    """float32 [T] of the T - 1 values of a datum's targets: position t is about token t, 0 has none."""
    return np.concatenate([[0.0], values.to_numpy()]).astype(np.float32)


def minibatches(batch: Sequence[WeightedRollout], number: int, *, seed: str) -> list[list[WeightedRollout]]:
    """The batch shuffled and cut into `number` parts of one size, give or take one, or one part a sequence if
    it has fewer.

    The parts depend on the seed and on the batch's content, not on its order: a step trains the same if its
    episodes end in another order, or if it is repeated after a restart.
    """
    ordered = sorted(batch, key=lambda item: (item.rollout.tokens.tobytes(), item.advantages.tobytes()))
    random.Random(seed).shuffle(ordered)
    parts = np.array_split(range(len(ordered)), min(number, len(ordered)))
    return [[ordered[place] for place in part] for part in parts]


def divisors(part: Sequence[WeightedRollout], loss_mean: LossMean, *, episodes: float) -> Sequence[float]:
    """What the token losses of each sequence of a minibatch are divided by. `episodes`: those that the
    minibatch was planned to have."""
    if loss_mean == "episodes":
        return [episodes] * len(part)
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


SERVICE_LOSSES = frozenset({"ppo", "importance_sampling", "cispo", "gspo"})
"""Those that mean the same at a service. Its `dro` has no mask, so that prompts would train, and of its
`stable_reinforce` no formula is published."""


def check_loss(config: RunConfig) -> None:
    """Raises ConfigError if the run's backend cannot train with `training.loss_fn`."""
    training = config.training
    policy_loss(training)
    if config.engine.backend == "tinker" and training.loss_fn not in SERVICE_LOSSES:
        raise ConfigError(
            f"training.loss_fn: {training.loss_fn!r} needs the embedded engine; a service behind Tinker's "
            f"protocol trains a run with {', '.join(sorted(SERVICE_LOSSES))}"
        )
    if training.loss_fn == "gspo" and training.loss_mean != "sequences":
        raise ConfigError(
            f"training.loss_mean: {training.loss_mean} divides by tokens, as gspo does itself; use sequences"
        )


WIDE_CLIP = 0.05
"""Ratios of whole sequences stay so close to 1 that a clip this wide never acts."""


def wide_clip(config: TrainingConfig) -> str:
    """What to tell of `clip_low` and `clip_high` with gspo; empty: nothing."""
    given = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    wide = [f"{name}: {value:g}" for name, value in given.items() if value is not None and value > WIDE_CLIP]
    if config.loss_fn != "gspo" or not wide:
        return ""
    return (
        f"training.{', '.join(wide)} hardly ever clips the ratio of a whole sequence, which is a mean; leave "
        "it out for the 3e-4 and 4e-4 of gspo's authors"
    )


def _loss_config(config: TrainingConfig, loss: Loss) -> dict[str, float]:
    """`loss_fn_config`: the loss's own settings, under those of the config."""
    clip = {
        "clip_low_threshold": None if config.clip_low is None else 1 - config.clip_low,
        "clip_high_threshold": None if config.clip_high is None else 1 + config.clip_high,
    }
    given = {key: value for key, value in clip.items() if key in loss.settings and value is not None}
    return {**loss.settings, **given, **config.loss_config}
