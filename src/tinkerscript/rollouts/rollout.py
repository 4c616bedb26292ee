"""Training sequences: `Rollout`, `EpisodeRollouts`, `RolloutGroup`, `RolloutBatch`, `TrainingBatch`.

Shapes: T tokens of a sequence, P of its first prompt, R = T - P after it, G episodes of a group.

`TrainingBatch`: rollouts as padded arrays, for a trainer that takes rectangles.

Invariant: nothing is cut and nothing is shifted. Position t of a row is token t of its sequence, and what is
padding or was not sampled has mask 0 and weight 0.
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
    """One training sequence of T tokens: prompts and responses in the order in which the model saw them."""

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
    """NaN where the episode, not the rollout, keeps the reward."""

    rewards: FloatArray | None = None
    """float32 [T]: a reward for each token, 0 where none was sampled; None where there is no such thing."""

    shaped: bool = False
    """True: `rewards` are shares that sum to the episode's. False: each is the whole episode's."""

    parent: int | None = None
    """Index, among the sequences of its episode, of the earlier one that this one forks from; None for the
    first, and for one that shares nothing with those before it."""

    fork: int = 0
    """Tokens at the start that equal the parent sequence's: computed once by shared-prefix training."""

    @property
    def policy_versions(self) -> frozenset[int]:
        """Of every weights that sampled a part of it."""
        return frozenset(version for segment in self.segments for version in segment.call.policy_versions)

    @property
    def prompt_length(self) -> int:
        """P: tokens before the first sampled one."""
        return self.segments[0].start

    @property
    def prompt_tokens(self) -> IntArray:
        """int32 [P]: the first prompt."""
        return self.tokens[: self.prompt_length]

    @property
    def response_tokens(self) -> IntArray:
        """int32 [R], R = T - P: all that follows the first prompt; `response_mask` says what was sampled."""
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
        """float32 [R]. Raises ValueError for a rollout without rewards."""
        return self._rewards[self.prompt_length :]

    @property
    def returns(self) -> FloatArray:
        """float32 [T]: what a sampled token is worth, 0 where none was sampled.

        The episode's reward; for shaped rewards, their sum from this token on (the return, undiscounted).
        Raises ValueError for a rollout without rewards.
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
        """This rollout with its reward.

        A number is the episode's, and every sampled token's too; a sequence has one reward for each of the
        R response tokens and sums to the episode's. Raises ValueError for another length, or a reward that
        is not finite or falls on a token that was not sampled.
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
                raise ValueError("a token reward falls on a token that was not sampled")
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
    """One sequence for an episode whose history was never edited."""

    calls: tuple[Call, ...] = ()
    metadata: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class WeightedRollout:
    """A rollout and what its tokens weigh in the loss."""

    rollout: Rollout
    advantages: FloatArray
    """float32 [T]: 0 where no token was sampled."""

    @classmethod
    def uniform(cls, rollout: Rollout, advantage: float) -> WeightedRollout:
        """Every sampled token with the same advantage."""
        return cls(rollout, np.where(rollout.sampled, np.float32(advantage), np.float32(0)))

    def scaled(self, factor: float) -> WeightedRollout:
        return WeightedRollout(self.rollout, (self.advantages * factor).astype(np.float32))

    @property
    def scalar(self) -> float | None:
        """The one advantage of all sampled tokens; None if they differ."""
        values = self.advantages[self.rollout.sampled]
        return float(values[0]) if len(values) and (values == values[0]).all() else None


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The accepted episodes of one sample, to be compared with each other (GRPO)."""

    group_id: str
    episodes: tuple[EpisodeRollouts, ...]

    def advantages(self, rule: AdvantageRule = PLAIN) -> FloatArray:
        """float32 [G]: each episode's reward against its group, by `rule`; 0 where all are equal."""
        if not self.rewards_differ:
            return np.zeros(len(self.episodes), dtype=np.float32)
        rewards = self.rewards
        above = np.asarray(rewards, dtype=np.float64) - rule.baselines(rewards)
        return (above / rule.divisor(rewards)).astype(np.float32)

    def weighted(self, rule: AdvantageRule = PLAIN) -> Iterator[WeightedRollout]:
        """Every sequence with its tokens' advantages.

        A token's advantage is its return (`Rollout.returns`; the episode's reward for a rollout without
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
        """False for a group whose episodes are all worth the same."""
        return max(self.rewards) > min(self.rewards)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The groups of one training step."""

    groups: tuple[RolloutGroup, ...]
    step: int = 0
    """Training step that they are for; 0 if for none in particular."""

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
    """int32 [B, T]: `pad_token_id` after a sequence's end."""

    position_ids: IntArray
    """int32 [B, T]: 0, 1, ... of each row, 0 in the padding."""

    attention_mask: BoolArray
    """bool [B, T]: False in the padding."""

    loss_masks: BoolArray
    """bool [B, T]: True where the policy sampled the token."""

    loss_weights: FloatArray
    """float32 [B, T]: mask times advantage."""

    policy_logprobs: FloatArray
    """float32 [B, T]: the sampler's log probability; 0 where the mask is False."""

    lengths: npt.NDArray[np.int32]
    """int32 [B]: tokens of each sequence."""

    rollouts: tuple[WeightedRollout, ...]
    """What the rows were made of: [B]."""

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

        Raises ValueError for no rollouts, or one longer than `length`: cutting it would leave sampled tokens
        out of the loss unseen.
        """
        if not rollouts:
            raise ValueError("a training batch needs at least one rollout")
        lengths = np.array([len(item.rollout.tokens) for item in rollouts], dtype=np.int32)
        longest = int(lengths.max())
        width = -(-longest // multiple_of) * multiple_of if length is None else length
        if longest > width:
            uuid = rollouts[int(lengths.argmax())].rollout.episode_uuid
            raise ValueError(
                f"the sequence of episode {uuid} has {longest} tokens, more than length={length}: give it "
                "room or leave it out"
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
