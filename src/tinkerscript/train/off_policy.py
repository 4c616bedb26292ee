"""How old training data may be (`PolicyLags`), and groups to train on again (`ReplayBuffer`).

An episode's lag is the number of training steps from its oldest weights to those that it would train. Nothing
trains from undone weights, or at a lag above `max_policy_lag` (for replayed groups `replay_uses` - 1, if
more).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tinkerscript.config import TrainingConfig
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.trainer_link.messages import EpisodeAccepted

AcceptedGroup = tuple[str, Sequence[EpisodeAccepted]]

LagCounts = Counter[int | None]
"""Lag -> episodes. None: from weights that this run does not build on."""


@dataclass
class Fresh:
    groups: list[AcceptedGroup] = field(default_factory=list[AcceptedGroup])
    lags: LagCounts = field(default_factory=LagCounts)
    stale: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def all_stale(self) -> bool:
        return bool(self.lags) and len(self.stale) == self.lags.total()


class PolicyLags:
    def __init__(
        self,
        config: TrainingConfig,
        steps_of: Mapping[int, int] | None = None,
        *,
        max_lag: int,
        keeps_stale: bool = False,
    ) -> None:
        """`keeps_stale`: old episodes still count in comparisons."""
        self.max, self._max_again = max_lag, max(max_lag, config.replay_uses - 1)
        self._keeps_stale = keeps_stale
        self._min_group = config.min_group
        self._steps_of = dict(steps_of or {})

    def published(self, version: int, *, step: int) -> None:
        self._steps_of[version] = step

    def by_version(self, step: int) -> dict[int, int]:
        return {version: step - steps for version, steps in self._steps_of.items()}

    def usable(self, step: int) -> list[int] | None:
        if self._keeps_stale:
            return None
        return [version for version, lag in self.by_version(step).items() if lag <= self.max]

    def of_group(self, group: RolloutGroup, *, step: int) -> LagCounts:
        return LagCounts(
            self._lag({version for call in episode.calls for version in call.policy_versions}, step)
            for episode in group.episodes
        )

    def may_train(self, group: RolloutGroup, *, step: int) -> bool:
        lags = self.of_group(group, step=step)
        return all(lag is not None and lag <= self._max_again for lag in lags)

    def fresh(self, groups: Iterable[AcceptedGroup], *, step: int) -> Fresh:
        found = Fresh()
        for group_id, accepted in groups:
            kept, has_fresh = list[EpisodeAccepted](), False
            for outcome in accepted:
                lag = self._lag(outcome.policy_versions, step)
                found.lags[lag] += 1
                is_fresh = lag is not None and lag <= self.max
                has_fresh |= is_fresh
                if is_fresh or self._keeps_stale:
                    kept.append(outcome)
                if not is_fresh:
                    age = f"{lag} steps old"
                    if lag is None:
                        age = "sampled by weights that this run does not build on"
                    found.stale[outcome.episode_uuid] = f"stale: {age}"
            if has_fresh and len(kept) >= self._min_group:
                found.groups.append((group_id, kept))
        return found

    def _lag(self, versions: Iterable[int], step: int) -> int | None:
        behind = [self._steps_of.get(version) for version in versions]
        known = [steps for steps in behind if steps is not None]
        return step - min(known, default=step) if len(known) == len(behind) else None


# Groups usually get too old first.
CAPACITY = 256

# The n-th oldest group has weight n to this power (Marin's `alpha`).
RECENCY = 3.0


@dataclass(slots=True)
class _Kept:
    group: RolloutGroup
    uses: int = 0


class ReplayBuffer:
    """Draws depend only on the seed, the step and earlier groups."""

    def __init__(self, config: TrainingConfig, *, seed: int, capacity: int = CAPACITY) -> None:
        self._uses = config.replay_uses
        self._number = (config.replay_uses - 1) * config.groups_per_step
        self._seed = seed
        self._capacity = capacity
        self._kept: dict[tuple[str, ...], _Kept] = {}
        self._stale = 0

    @property
    def episodes(self) -> set[str]:
        return {uuid for key in self._kept for uuid in key}

    def drop(self, is_fresh: Callable[[RolloutGroup], bool]) -> None:
        stale = [key for key, kept in self._kept.items() if not is_fresh(kept.group)]
        for key in stale:
            del self._kept[key]
        self._stale = len(stale)

    def draw(self, step: int) -> list[RolloutGroup]:
        """Draw without replacement, favoring newer groups."""
        # The largest u ** (1 / weight) form a weighted sample (Efraimidis and Spirakis 2006).
        uniform = random.Random(f"{self._seed}/{step}/replay")
        drawn = [
            (uniform.random() ** (1 / place**RECENCY), key) for place, key in enumerate(self._kept, start=1)
        ]
        return [self._kept[key].group for _, key in sorted(drawn)[-self._number :]]

    def record(self, groups: Iterable[RolloutGroup]) -> None:
        for group in groups:
            key = tuple(episode.episode_uuid for episode in group.episodes)
            kept = self._kept.setdefault(key, _Kept(group))
            kept.uses += 1
            if kept.uses >= self._uses:
                del self._kept[key]
        for key in list(self._kept)[: -self._capacity]:
            del self._kept[key]

    def metrics(self, drawn: Sequence[RolloutGroup]) -> dict[str, float]:
        found = {"groups": len(drawn), "kept": len(self._kept), "stale": self._stale}
        return {f"replay/{name}": float(value) for name, value in found.items()}
