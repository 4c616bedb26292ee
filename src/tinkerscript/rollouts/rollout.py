"""Training data, from one sequence to a padded batch.

    Rollout            one sequence of T tokens
    EpisodeRollouts    the sequences of one episode, and its reward
    RolloutGroup       the G episodes of one sample; gives advantages
    RolloutBatch       the groups of one training step
    WeightedRollout    a sequence and its tokens' advantages
    TrainingBatch      B weighted sequences, padded to [B, T]

A sequence has T tokens: P of its first prompt, R = T - P after it.

Invariant: nothing is truncated or shifted. Position t of a row is token t of its sequence; padding and tokens
that were not sampled have mask 0 and weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tinkerscript.rollouts.advantages import PLAIN, AdvantageRule
from tinkerscript.rollouts.call import Call, FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Segment:
    """The span [start, end) of a rollout that one call sampled."""

    call: Call
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One training sequence of T tokens: prompts and responses in the order the model saw them."""

    episode_uuid: str
    tokens: IntArray
    """int32 [T]"""

    sampled: BoolArray
    """bool [T]: True where the policy sampled the token."""

    logprobs: FloatArray
    """float32 [T]: the sampler's log probability; 0 where `sampled` is False."""

    segments: tuple[Segment, ...]
    """The calls of this sequence, in order; their spans cover exactly the sampled tokens."""

    env_name: str = ""
    env_example_id: str = ""
    episode_reward: float = float("nan")
    """NaN if the episode, not the rollout, holds the reward."""

    rewards: FloatArray | None = None
    """float32 [T]: a reward per token, 0 where none was sampled; None without token rewards."""

    shaped: bool = False
    """True: `rewards` are shares that sum to the episode's reward. False: each is the episode's reward."""

    parent: int | None = None
    """Index within the episode of the earlier sequence that this one forks from; None for the first sequence
    and for one that shares nothing with earlier ones."""

    fork: int = 0
    """Number of leading tokens shared with the parent sequence, for shared-prefix training."""

    @property
    def policy_versions(self) -> frozenset[int]:
        """Versions of all weights that sampled a part of it."""
        return frozenset(version for segment in self.segments for version in segment.call.policy_versions)

    @property
    def prompt_length(self) -> int:
        """P: number of tokens before the first sampled one."""
        return self.segments[0].start

    @property
    def prompt_tokens(self) -> IntArray:
        """int32 [P]: the first prompt."""
        return self.tokens[: self.prompt_length]

    @property
    def response_tokens(self) -> IntArray:
        """int32 [R]: everything after the first prompt; `response_mask` says what was sampled."""
        return self.tokens[self.prompt_length :]

    @property
    def response_mask(self) -> BoolArray:
        """bool [R]"""
        return self.sampled[self.prompt_length :]

    @property
    def response_logprobs(self) -> FloatArray:
        """float32 [R]"""
        return self.logprobs[self.prompt_length :]

    @property
    def token_rewards(self) -> FloatArray:
        """float32 [R]. Raises ValueError without rewards."""
        return self._rewards[self.prompt_length :]

    @property
    def returns(self) -> FloatArray:
        """float32 [T]: the return of each sampled token, 0 where none was sampled.

        The episode's reward, or for shaped rewards their undiscounted sum from the token on. Raises
        ValueError without rewards.
        """
        if not self.shaped:
            return self._rewards
        to_go = self._rewards[::-1].cumsum(dtype=np.float64)[::-1].astype(np.float32)
        return np.where(self.sampled, to_go, np.float32(0))

    @property
    def _rewards(self) -> FloatArray:
        if self.rewards is None:
            raise ValueError(f"the rollout of episode {self.episode_uuid} has no token rewards")
        return self.rewards

    def rewarded(
        self, reward: float | Sequence[float] | FloatArray, env_name: str = "", env_example_id: str = ""
    ) -> Rollout:
        """Return a copy with its reward.

        A number is the episode's reward, and that of every sampled token; a sequence holds one reward for
        each of the R response tokens and sums to the episode's. Raises ValueError for a wrong length, a
        reward that is not finite, or a reward on a token that was not sampled.
        """
        rewards = np.zeros(len(self.tokens), dtype=np.float32)
        shaped = not isinstance(reward, int | float)
        if isinstance(reward, int | float):
            total = float(reward)
            rewards[self.sampled] = total
        else:
            shares = np.asarray(reward, dtype=np.float32)
            if shares.shape != self.response_mask.shape:
                raise ValueError(f"{len(shares)} token rewards for {len(self.response_mask)} response tokens")
            if shares[~self.response_mask].any():
                raise ValueError("a token reward is on a token that was not sampled")
            rewards[self.prompt_length :] = shares
            total = float(shares.sum())
        if not np.isfinite(rewards).all() or not np.isfinite(total):
            raise ValueError(f"a reward must be a finite number, got {reward!r}")
        return replace(
            self,
            rewards=rewards,
            shaped=shaped,
            episode_reward=total,
            env_name=env_name,
            env_example_id=env_example_id,
        )


@dataclass(frozen=True, slots=True)
class EpisodeRollouts:
    """One accepted episode: its reward and its sequences."""

    episode_uuid: str
    reward: float
    rollouts: tuple[Rollout, ...]
    """A single sequence unless the history was edited."""

    calls: tuple[Call, ...] = ()
    metadata: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class WeightedRollout:
    """A rollout and its tokens' advantages."""

    rollout: Rollout
    advantages: FloatArray
    """float32 [T]: 0 where no token was sampled."""

    @classmethod
    def uniform(cls, rollout: Rollout, advantage: float) -> WeightedRollout:
        """Give every sampled token the same advantage."""
        return cls(rollout, np.where(rollout.sampled, np.float32(advantage), np.float32(0)))

    def scaled(self, factor: float) -> WeightedRollout:
        return WeightedRollout(self.rollout, (self.advantages * factor).astype(np.float32))

    @property
    def scalar(self) -> float | None:
        """The common advantage of all sampled tokens; None if they differ."""
        values = self.advantages[self.rollout.sampled]
        return float(values[0]) if len(values) and (values == values[0]).all() else None


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The accepted episodes of one sample, which GRPO compares with each other."""

    group_id: str
    episodes: tuple[EpisodeRollouts, ...]

    def advantages(self, rule: AdvantageRule = PLAIN) -> FloatArray:
        """float32 [G]: advantages of the episodes by `rule`; all 0 if the rewards are equal."""
        if not self.rewards_differ:
            return np.zeros(len(self.episodes), dtype=np.float32)
        rewards = self.rewards
        above = np.asarray(rewards, dtype=np.float64) - rule.baselines(rewards)
        return (above / rule.divisor(rewards)).astype(np.float32)

    def weighted(self, rule: AdvantageRule = PLAIN) -> Iterator[WeightedRollout]:
        """Yield every sequence with its tokens' advantages.

        A token's advantage is its return (`Rollout.returns`, or the episode's reward for a rollout without
        token rewards) minus its episode's baseline, divided by the group's scale.
        """
        baselines, divisor = rule.baselines(self.rewards), rule.divisor(self.rewards)
        advantages = self.advantages(rule).tolist()
        for episode, advantage, baseline in zip(self.episodes, advantages, baselines, strict=True):
            for rollout in episode.rollouts:
                if not rollout.shaped:
                    yield WeightedRollout.uniform(rollout, advantage)
                else:
                    above = ((rollout.returns - baseline) / divisor).astype(np.float32)
                    yield WeightedRollout(rollout, np.where(rollout.sampled, above, np.float32(0)))

    @property
    def rewards(self) -> list[float]:
        """[G]"""
        return [episode.reward for episode in self.episodes]

    @property
    def rewards_differ(self) -> bool:
        """False if all episodes have the same reward."""
        return max(self.rewards) > min(self.rewards)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The groups of one training step."""

    groups: tuple[RolloutGroup, ...]
    step: int = 0
    """The training step; 0 if unspecified."""

    @property
    def episodes(self) -> tuple[EpisodeRollouts, ...]:
        return tuple(episode for group in self.groups for episode in group.episodes)

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for episode in self.episodes for rollout in episode.rollouts)

    @property
    def policy_versions(self) -> frozenset[int]:
        return frozenset(version for rollout in self.rollouts for version in rollout.policy_versions)

    def weighted(self) -> list[WeightedRollout]:
        """Every sequence with its tokens' advantages (`RolloutGroup.weighted`)."""
        return [weighted for group in self.groups for weighted in group.weighted()]


Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """B sequences, right-padded to T positions."""

    input_ids: IntArray
    """int32 [B, T]: `pad_token_id` after the end of a sequence."""

    position_ids: IntArray
    """int32 [B, T]: 0, 1, ... in each row, 0 in the padding."""

    attention_mask: BoolArray
    """bool [B, T]: False in the padding."""

    loss_masks: BoolArray
    """bool [B, T]: True where the policy sampled the token."""

    loss_weights: FloatArray
    """float32 [B, T]: mask times advantage."""

    policy_logprobs: FloatArray
    """float32 [B, T]: the sampler's log probability; 0 where the mask is False."""

    lengths: npt.NDArray[np.int32]
    """int32 [B]: length of each sequence."""

    rollouts: tuple[WeightedRollout, ...]
    """The rows' sources: [B]."""

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

        Raises ValueError for no rollouts, or one longer than `length`: truncating it would silently drop
        sampled tokens from the loss.
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
            input_ids=_padded([item.rollout.tokens for item in rollouts], width, pad_token_id),
            position_ids=np.where(present, np.arange(width), 0).astype(np.int32),
            attention_mask=present,
            loss_masks=_padded([item.rollout.sampled for item in rollouts], width),
            loss_weights=_padded([item.advantages for item in rollouts], width),
            policy_logprobs=_padded([item.rollout.logprobs for item in rollouts], width),
            lengths=lengths,
            rollouts=tuple(rollouts),
        )


def _padded(rows: Sequence[npt.NDArray[Scalar]], width: int, fill: int = 0) -> npt.NDArray[Scalar]:
    out = np.full((len(rows), width), fill, dtype=rows[0].dtype)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out
