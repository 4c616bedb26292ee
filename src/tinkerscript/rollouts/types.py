"""Training sequences: `Rollout` and `RolloutGroup`, with numpy arrays and nothing of any trainer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

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

    @property
    def policy_versions(self) -> frozenset[int]:
        return frozenset(segment.call.policy_version for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Episode:
    """One accepted episode: its reward and its sequences."""

    episode_uuid: str
    reward: float
    rollouts: tuple[Rollout, ...]
    """One sequence for an episode whose history was never edited."""

    calls: tuple[Call, ...] = ()
    metadata: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The accepted episodes of one sample, to be compared with each other (GRPO)."""

    group_id: str
    episodes: tuple[Episode, ...]

    def advantages(self) -> FloatArray:
        """Reward minus the group's mean reward, float32 [G] (Shao et al. 2024, without the deviation)."""
        rewards = np.array([episode.reward for episode in self.episodes], dtype=np.float64)
        return (rewards - rewards.mean()).astype(np.float32)

    @property
    def rewards_differ(self) -> bool:
        """False for a group that carries no gradient."""
        rewards = [episode.reward for episode in self.episodes]
        return max(rewards) > min(rewards)
