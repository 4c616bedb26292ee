"""`Credit`: each model call's share of an episode's reward, and its baseline (docs/rewards.md).

An episode has T calls. Invariant: without rewards of calls and with discount 1, `turn` equals
`RolloutGroup.weighted` bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tinkerscript.rollouts.advantages import (
    PAST_BASELINES,
    PLAIN,
    AdvantageRule,
    Doubles,
    RolloutGroup,
    WeightedRollout,
)
from tinkerscript.rollouts.rollout import EpisodeRollouts

CreditLevel = Literal["episode", "turn", "state"]


@dataclass(frozen=True, slots=True)
class Credit:
    level: CreditLevel = "turn"
    """docs/rewards.md#the-advantage-of-a-call defines each level.
    """

    discount: float = 1.0

    def weighted(self, group: RolloutGroup, rule: AdvantageRule = PLAIN) -> Iterator[WeightedRollout]:
        if self._is_of_episodes(group, rule):
            yield from group.weighted(rule)
            return
        for episode, advantages in zip(group.episodes, self.advantages(group, rule), strict=True):
            by_call = dict(zip((call.call_id for call in episode.calls), advantages.tolist(), strict=True))
            for rollout in episode.rollouts:
                values = np.zeros(len(rollout.tokens), dtype=np.float32)
                for segment in rollout.segments:
                    values[segment.start : segment.end] = by_call[segment.call.call_id]
                yield WeightedRollout(rollout, np.where(rollout.loss_mask, values, np.float32(0)))

    def differs(self, group: RolloutGroup, rule: AdvantageRule = PLAIN) -> bool:
        if self._is_of_episodes(group, rule):
            return group.rewards_differ
        return any(each.any() for each in self.advantages(group, rule))

    def advantages(self, group: RolloutGroup, rule: AdvantageRule = PLAIN) -> list[Doubles]:
        """float64 [T] per episode. Not for `episode`."""
        # Each call has one baseline for its whole return. A baseline per turn would be a hidden price on
        # every further turn (verl-project/verl#7244).
        returns = [returns_of(rewards_of_calls(episode), self.discount) for episode in group.episodes]
        found = [np.zeros(len(each)) for each in returns]
        if self.level == "state":
            whole = group.advantages(rule).tolist()
            found = [np.full(len(each), advantage) for each, advantage in zip(returns, whole, strict=True)]
        compared = defaultdict[int | bytes, list[tuple[int, int]]](list)
        for place, episode in enumerate(group.episodes):
            for turn, call in enumerate(episode.calls):
                compared[turn if self.level == "turn" else call.new_prompt].append((place, turn))
        for places in compared.values():
            values = [float(returns[place][turn]) for place, turn in places]
            if rule.baseline != "none" and (len(values) < 2 or max(values) == min(values)):
                continue
            above = (np.asarray(values) - rule.baselines(values)) / rule.divisor(values, group.past)
            for (place, turn), advantage in zip(places, above.tolist(), strict=True):
                found[place][turn] += advantage
        return found

    def _is_of_episodes(self, group: RolloutGroup, rule: AdvantageRule) -> bool:
        # Pass@k, named scores and other episodes' means are of whole episodes.
        if self.level == "episode" or rule.pass_k > 1 or rule.weights or rule.baseline in PAST_BASELINES:
            return True
        has_own = any(episode.call_rewards for episode in group.episodes)
        return self.level == "turn" and self.discount == 1 and not has_own


def rewards_of_calls(episode: EpisodeRollouts) -> Doubles:
    """float64 [T]. The last call has the rest of the episode's reward."""
    own = episode.call_rewards
    rewards = np.array([own.get(call.call_id, 0.0) for call in episode.calls], dtype=np.float64)
    if len(rewards):
        rewards[-1] += episode.reward - sum(own.values())
    return rewards


def returns_of(rewards: Doubles, discount: float) -> Doubles:
    """float64 [T]"""
    returns, later = np.zeros(len(rewards)), 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        later = returns[turn] = rewards[turn] + discount * later
    return returns
