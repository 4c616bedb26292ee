"""From rewards to advantages, and to padded batches (docs/training.md#advantages).

Position t of a row is token t of its sequence. Padding and tokens without loss have mask 0 and weight 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tinkerscript.errors import MAX_REWARD
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.rollout import BoolArray, EpisodeRollouts, Rollout

Doubles = npt.NDArray[np.float64]

# Rounding differences must not give large advantages.
EPSILON = 1e-6

Baseline = Literal["group_mean", "leave_one_out", "running_mean", "sample_mean", "none"]
Scale = Literal["none", "group_deviation", "group_mean", "batch_deviation", "running_deviation"]

PAST_BASELINES = ("running_mean", "sample_mean")


class Moments(msgspec.Struct, frozen=True):
    """Count, mean and squared differences from the mean of all rewards so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def adding(self, rewards: Sequence[float]) -> Moments:
        """Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", equations 2.1."""
        if not rewards:
            return self
        r = np.asarray(rewards, dtype=np.float64)
        count, apart = self.count + len(r), float(r.mean()) - self.mean
        return Moments(
            count,
            self.mean + apart * len(r) / count,
            self.squares + float(((r - r.mean()) ** 2).sum()) + apart**2 * self.count * len(r) / count,
        )

    @property
    def deviation(self) -> float:
        """The sample deviation; 1 if all rewards are equal."""
        return math.sqrt(self.squares / (self.count - 1)) if self.squares > 0 else 1.0


# The mean remembers about 1 / (1 - MEMORY) groups, like SPO's tracker at its shortest.
MEMORY = 0.875


class SampleMean(msgspec.Struct, frozen=True, array_like=True):
    """A sample's mean reward, in which a group counts `MEMORY` times as much as the next.

    With rewards of 0 and 1 this is SPO's value tracker (Xu and Ding 2025, arXiv:2509.13232) with a constant
    rho and without prior counts.
    """

    total: float = 0.0
    weight: float = 0.0

    def adding(self, rewards: Sequence[float]) -> SampleMean:
        return SampleMean(MEMORY * self.total + sum(rewards), MEMORY * self.weight + len(rewards))

    @property
    def mean(self) -> float:
        return self.total / self.weight


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """Advantage = (r - baseline) / scale, for the rewards r of G episodes (papers: docs/recipes.md)."""

    baseline: Baseline = "group_mean"
    """`group_mean`: the mean of r. `leave_one_out`: the mean of the other G - 1 rewards. `running_mean` and
    `sample_mean`: `RolloutGroup.past`. `none`: 0.
    """

    scale: Scale = "none"
    """`group_deviation`: the sample standard deviation of r. `group_mean`: the mean of r.
    `running_deviation`: `RolloutGroup.past`. `batch_deviation`: 1, because `whitened` divides later.
    """

    pass_k: int = 1
    """Above 1, r is an episode's mean best reward over all sets of this many episodes that include it.
    Baseline and deviation are then also of the sets' best rewards.
    """

    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weights by score name. The advantage is the weighted sum of the scores' advantages, each divided by its
    sample deviation (GDPO).
    """

    @property
    def spans_groups(self) -> bool:
        """Whether groups with equal rewards train too."""
        return self.scale == "batch_deviation" or self.baseline in PAST_BASELINES

    @property
    def uses_past(self) -> bool:
        return self.baseline in PAST_BASELINES or self.scale == "running_deviation"

    def baselines(self, rewards: Sequence[float], past: Past | None = None) -> Doubles:
        """float64 [G]. Raises ValueError for `leave_one_out` of a single episode."""
        r = np.asarray(rewards, dtype=np.float64)
        if self.baseline == "none":
            return np.zeros(len(r))
        if self.baseline in PAST_BASELINES:
            return np.full(len(r), _known(past).mean)
        if self.baseline == "group_mean":
            return np.full(len(r), r.mean())
        if len(r) < 2:
            raise ValueError("leave_one_out needs a group of two episodes or more")
        return (r.sum() - r) / (len(r) - 1)

    def divisor(self, rewards: Sequence[float], past: Past | None = None) -> float:
        """Return 1 for `none` and equal rewards, and infinity for `group_mean` without a positive mean."""
        if self.scale == "running_deviation":
            return _known(past).deviation + EPSILON
        if self.scale in ("none", "batch_deviation") or max(rewards) == min(rewards):
            return 1.0
        r = np.asarray(rewards, dtype=np.float64)
        if self.scale == "group_deviation":
            return float(np.std(r, ddof=1)) + EPSILON
        return float(r.mean()) + EPSILON if r.mean() > 0 else math.inf

    def of(self, rewards: Sequence[float], past: Past | None = None) -> Doubles:
        """float64 [G]"""
        if self.pass_k > 1:
            return self._of_sets(np.asarray(rewards, dtype=np.float64))
        above = np.asarray(rewards, dtype=np.float64) - self.baselines(rewards, past)
        return above / self.divisor(rewards, past)

    def _of_sets(self, rewards: Doubles) -> Doubles:
        size, k = len(rewards), self.pass_k
        if size < k:
            raise ValueError(f"pass_k: {k} needs a group of {k} episodes or more, got {size}")
        order = np.argsort(rewards, kind="stable")
        r = rewards[order]
        # `best`: share of sets in which the i-th lowest reward is the best. `alone` and `beside`: of the sets
        # with a given episode, the share in which its own reward, or a better episode's, is the best.
        best = np.array([comb(i, k - 1) for i in range(size)]) / comb(size, k)
        beside = np.array([comb(i - 1, k - 2) if i else 0 for i in range(size)]) / comb(size - 1, k - 1)
        alone = np.array([comb(i, k - 1) for i in range(size)]) / comb(size - 1, k - 1)
        later = np.append(np.cumsum((beside * r)[::-1])[::-1][1:], 0.0)
        mean = float(best @ r)
        above = alone * r + later - mean
        if self.scale == "group_deviation":
            above = above / (np.sqrt(max(0.0, float(best @ r**2) - mean**2)) + EPSILON)
        found = np.empty(size)
        found[order] = above
        return found


PLAIN = AdvantageRule()


@dataclass(frozen=True, slots=True)
class Past:
    mean: float
    deviation: float


def _known(past: Past | None) -> Past:
    if past is None:
        raise ValueError("a group without `past` has no running_mean, sample_mean or running_deviation")
    return past


@dataclass(frozen=True, slots=True)
class WeightedRollout:
    rollout: Rollout
    advantages: FloatArray
    """float32 [T]: 0 without loss (`Rollout.loss_mask`)."""

    reference: FloatArray | None = None
    """float32 [T]: logprobs to compare the policy's with; None: the sampler's."""

    @classmethod
    def uniform(cls, rollout: Rollout, advantage: float) -> WeightedRollout:
        return cls(rollout, np.where(rollout.loss_mask, np.float32(advantage), np.float32(0)))

    def scaled(self, factor: float) -> WeightedRollout:
        return replace(self, advantages=(self.advantages * factor).astype(np.float32))

    @property
    def scalar(self) -> float | None:
        """The advantage that all tokens with loss share (0 without any), or None."""
        values = self.advantages[self.rollout.loss_mask]
        if not len(values):
            return 0.0
        return float(values[0]) if (values == values[0]).all() else None


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The accepted episodes of one sample."""

    group_id: str
    episodes: tuple[EpisodeRollouts, ...]
    past: Past | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a reward above `errors.MAX_REWARD` in magnitude."""
        for episode in self.episodes:
            if not abs(episode.reward) <= MAX_REWARD:
                raise ValueError(
                    f"the reward of episode {episode.episode_uuid} must be finite and at most "
                    f"{MAX_REWARD:g} in magnitude, got {episode.reward}"
                )

    def advantages(self, rule: AdvantageRule = PLAIN) -> FloatArray:
        """float32 [G]. All 0 for equal rewards, if they are compared with each other."""
        if rule.weights:
            scale = AdvantageRule(rule.baseline, "group_deviation")
            parts = [weight * scale.of(self._scores(name)) for name, weight in rule.weights.items()]
            return np.sum(parts, axis=0).astype(np.float32)
        if not self.rewards_differ and rule.baseline in ("group_mean", "leave_one_out"):
            return np.zeros(len(self.episodes), dtype=np.float32)
        return rule.of(self.rewards, self.past).astype(np.float32)

    def _scores(self, name: str) -> list[float]:
        return [episode.scores[name] for episode in self.episodes]

    def weighted(self, rule: AdvantageRule = PLAIN) -> Iterator[WeightedRollout]:
        """Yield every sequence with its tokens' advantages.

        These are the tokens' returns (`Rollout.returns`, or the episode's reward) minus the episode's
        baseline, divided by the group's scale.
        """
        baselines = rule.baselines(self.rewards, self.past)
        divisor = rule.divisor(self.rewards, self.past)
        advantages = self.advantages(rule).tolist()
        for episode, advantage, baseline in zip(self.episodes, advantages, baselines, strict=True):
            for rollout in episode.rollouts:
                if not rollout.shaped:
                    yield WeightedRollout.uniform(rollout, advantage)
                else:
                    above = ((rollout.returns - baseline) / divisor).astype(np.float32)
                    yield WeightedRollout(rollout, np.where(rollout.loss_mask, above, np.float32(0)))

    @property
    def rewards(self) -> list[float]:
        return [episode.reward for episode in self.episodes]

    @property
    def rewards_differ(self) -> bool:
        """Whether rewards, or scores that replace them, differ."""
        if any(episode.scores != self.episodes[0].scores for episode in self.episodes):
            return True
        return max(self.rewards) > min(self.rewards)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    groups: tuple[RolloutGroup, ...]


def whitened(batch: Sequence[WeightedRollout]) -> list[WeightedRollout]:
    """Normalize advantages to mean 0 and sample deviation 1 over all tokens with loss, unless all are equal.

    Hu et al. 2025, arXiv:2501.03262.
    """
    every = np.concatenate([item.advantages[item.rollout.loss_mask] for item in batch]).astype(np.float64)
    if len(every) < 2 or every.max() == every.min():
        return list(batch)
    mean, deviation = every.mean(), every.std(ddof=1)
    return [
        replace(
            item,
            advantages=np.where(item.rollout.loss_mask, (item.advantages - mean) / deviation, 0).astype(
                np.float32
            ),
        )
        for item in batch
    ]


Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B sequences, right-padded to T positions."""

    input_ids: IntArray
    """int32 [B, T]: `pad_token_id` in padding."""

    position_ids: IntArray
    """int32 [B, T]: 0, 1, ... in each row, 0 in padding."""

    attention_mask: BoolArray
    """bool [B, T]: False in padding."""

    loss_masks: BoolArray
    """bool [B, T]: True where a token has loss."""

    loss_weights: FloatArray
    """float32 [B, T]: mask times advantage."""

    policy_logprobs: FloatArray
    """float32 [B, T]: the sampler's; 0 where no token was sampled."""

    lengths: npt.NDArray[np.int32]
    """int32 [B]"""

    rollouts: tuple[WeightedRollout, ...]
    """[B]"""

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(
        cls,
        rollouts: Sequence[WeightedRollout],
        *,
        pad_token_id: int = 0,
        length: int | None = None,
        multiple_of: int = 1,
    ) -> TrainingBatch:
        """Pad to `length`, or to the longest sequence rounded up to a multiple of `multiple_of`.

        Raises ValueError without rollouts, or for one longer than `length`.
        """
        if not rollouts:
            raise ValueError("a training batch needs at least one rollout")
        lengths = np.array([len(item.rollout.tokens) for item in rollouts], dtype=np.int32)
        longest = int(lengths.max())
        width = -(-longest // multiple_of) * multiple_of if length is None else length
        if longest > width:
            uuid = rollouts[int(lengths.argmax())].rollout.episode_uuid
            raise ValueError(
                f"the sequence of episode {uuid} has {longest} tokens, more than length={length}; "
                "raise length or leave the sequence out"
            )
        present = np.arange(width) < lengths[:, None]
        return cls(
            input_ids=padded([item.rollout.tokens for item in rollouts], width, pad_token_id),
            position_ids=np.where(present, np.arange(width), 0).astype(np.int32),
            attention_mask=present,
            loss_masks=padded([item.rollout.loss_mask for item in rollouts], width),
            loss_weights=padded([item.advantages for item in rollouts], width),
            policy_logprobs=padded([item.rollout.logprobs for item in rollouts], width),
            lengths=lengths,
            rollouts=tuple(rollouts),
        )


def padded(
    rows: Sequence[npt.NDArray[Scalar]], width: int, fill: int = 0, *, left: bool = False
) -> npt.NDArray[Scalar]:
    out = np.full((len(rows), width), fill, dtype=rows[0].dtype)
    for line, row in zip(out, rows, strict=True):
        line[slice(width - len(row), width) if left else slice(len(row))] = row
    return out


# Reward shaping: float32 [R] for `Rollout.rewarded`, with shares on sampled tokens that sum to the reward.


def at_end(rollout: Rollout, reward: float) -> FloatArray:
    return by_call(rollout, [0.0] * (len(rollout.segments) - 1) + [reward])


def evenly(rollout: Rollout, reward: float) -> FloatArray:
    return discounted(rollout, reward, 1.0)


def discounted(rollout: Rollout, reward: float, discount: float) -> FloatArray:
    """Give each sampled token `discount` times the next one's share. Raises ValueError outside (0, 1]."""
    if not 0 < discount <= 1:
        raise ValueError(f"a discount must be above 0 and at most 1, got {discount}")
    weights = discount ** np.arange(int(rollout.sampled.sum()) - 1, -1, -1, dtype=np.float64)
    return _placed(rollout, reward * weights / weights.sum())


def by_call(rollout: Rollout, rewards: Sequence[float]) -> FloatArray:
    """Put each call's reward on its last sampled token. Raises ValueError unless each call has one."""
    if len(rewards) != len(rollout.segments):
        raise ValueError(f"{len(rewards)} rewards for {len(rollout.segments)} calls")
    shares = np.zeros(len(rollout.tokens), dtype=np.float32)
    for segment, reward in zip(rollout.segments, rewards, strict=True):
        shares[segment.end - 1] = reward
    return shares[rollout.prompt_length :]


def _placed(rollout: Rollout, values: npt.NDArray[np.float64]) -> FloatArray:
    shares = np.zeros(len(rollout.response_mask), dtype=np.float32)
    shares[rollout.response_mask] = values
    return shares
