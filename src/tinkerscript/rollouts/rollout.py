"""Training sequences, which `merge_calls` makes from an episode's calls.

A sequence has T tokens: P of its first prompt, then R = T - P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tinkerscript.errors import MAX_REWARD
from tinkerscript.rollouts.call import Call, FloatArray, IntArray, PlacedImage

BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Segment:
    """The span [start, end) of a rollout that one call sampled."""

    call: Call
    start: int
    end: int

    @property
    def versions(self) -> list[tuple[int, slice]]:
        """Return policy versions and their spans. If these are unknown, the oldest version has all."""
        spans = self.call.spans or [(min(self.call.policy_versions), 0)]
        ends = [*(first for _, first in spans[1:]), self.end - self.start]
        return [
            (version, slice(self.start + first, self.start + end))
            for (version, first), end in zip(spans, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One training sequence. Position t of any array is about token t, as the model saw it."""

    episode_uuid: str
    tokens: IntArray
    """int32 [T]"""

    sampled: BoolArray
    """bool [T]: True where the policy sampled the token."""

    loss_mask: BoolArray
    """bool [T]: True where the token carries loss: usually all sampled tokens that no grammar constrained."""

    logprobs: FloatArray
    """float32 [T]: the sampler's; 0 where `sampled` is False."""

    segments: tuple[Segment, ...]
    """Their spans are exactly the sampled tokens, in order."""

    env_name: str = ""
    env_example_id: str = ""
    episode_reward: float = float("nan")
    """NaN if the episode has it."""

    rewards: FloatArray | None = None
    """float32 [T]: reward per token, 0 where none was sampled."""

    shaped: bool = False
    """True: `rewards` sum to the episode's reward. False: each is the episode's reward."""

    parent: int | None = None
    """Index of the episode's earlier sequence that this one forks from."""

    fork: int = 0
    """Number of leading tokens shared with it."""

    experts: ByteArray | None = None
    """uint8 [T, bytes], as in `Call.experts`. None: not recorded. 0 bytes: recorded by different models."""

    images: tuple[PlacedImage, ...] = ()

    @property
    def policy_versions(self) -> frozenset[int]:
        return frozenset(version for segment in self.segments for version in segment.call.policy_versions)

    @property
    def temperatures(self) -> FloatArray:
        """float32 [T]: 1 where no token was sampled."""
        found = np.ones(len(self.tokens), dtype=np.float32)
        for segment in self.segments:
            found[segment.start : segment.end] = segment.call.temperature
        return found

    @property
    def is_truncated(self) -> bool:
        return self.segments[-1].call.stop_reason == "length"

    @property
    def prompt_length(self) -> int:
        return self.segments[0].start

    @property
    def prompt_tokens(self) -> IntArray:
        """int32 [P]"""
        return self.tokens[: self.prompt_length]

    @property
    def response_tokens(self) -> IntArray:
        """int32 [R]: everything after the first prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def response_mask(self) -> BoolArray:
        """bool [R]"""
        return self.sampled[self.prompt_length :]

    @property
    def response_loss_mask(self) -> BoolArray:
        """bool [R]"""
        return self.loss_mask[self.prompt_length :]

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
        """float32 [T]: return of each sampled token, 0 elsewhere.

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

        A number is the reward of the episode and of every sampled token. A sequence has a share for each of
        the R response tokens, which sum to the episode's. Raises ValueError for a wrong length, a magnitude
        above `errors.MAX_REWARD`, or a reward on a token that was not sampled.
        """
        rewards = np.zeros(len(self.tokens), dtype=np.float32)
        shares = _as_numbers(reward)
        shaped = shares.ndim > 0
        if not shaped:
            total = float(shares)
        else:
            shares = shares.astype(np.float32)
            if shares.shape != self.response_mask.shape:
                raise ValueError(
                    f"token rewards of the shape {shares.shape} for {len(self.response_mask)} response tokens"
                )
            if shares[~self.response_mask].any():
                raise ValueError("a token reward is on a token that was not sampled")
            rewards[self.prompt_length :] = shares
            total = float(shares.sum())
        if not np.isfinite(rewards).all() or not abs(total) <= MAX_REWARD:
            raise ValueError(f"a reward must be a finite number, at most {MAX_REWARD:g}, got {reward!r}")
        if not shaped:
            rewards[self.sampled] = total
        return replace(
            self,
            rewards=rewards,
            shaped=shaped,
            episode_reward=total,
            env_name=env_name,
            env_example_id=env_example_id,
        )


def _as_numbers(reward: object) -> npt.NDArray[np.float64]:
    # NumPy cannot convert every torch scalar.
    reward = getattr(reward, "tolist", lambda: reward)()
    try:
        numbers = np.asarray(reward)
        if numbers.dtype.kind not in "biuf":
            raise TypeError(f"its type is {numbers.dtype}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"a reward must be a finite number, or one for each token, got {reward!r}"
        ) from error
    return numbers.astype(np.float64)


@dataclass(frozen=True, slots=True)
class EpisodeRollouts:
    episode_uuid: str
    reward: float
    rollouts: tuple[Rollout, ...]
    """One sequence, unless a prompt edited the history."""

    calls: tuple[Call, ...] = ()
    metadata: dict[str, object] = field(default_factory=dict[str, object])
    call_rewards: dict[str, float] = field(default_factory=dict[str, float])
    """Call id -> its share of `reward`. The last call earned the rest."""
    scores: dict[str, float] = field(default_factory=dict[str, float])
    """Scores that replace the reward (`AdvantageRule.weights`)."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> EpisodeRollouts:
        """Raises ValueError unless all have the same episode uuid and reward."""
        found = {(rollout.episode_uuid, rollout.episode_reward) for rollout in rollouts}
        if len(found) != 1:
            raise ValueError(f"one episode has one uuid and one reward, got {sorted(found)}")
        ((episode_uuid, reward),) = found
        calls = (segment.call for rollout in rollouts for segment in rollout.segments)
        return cls(episode_uuid, reward, tuple(rollouts), tuple(calls))
