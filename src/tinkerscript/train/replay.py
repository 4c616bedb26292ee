"""`ReplayBuffer`: groups of earlier steps that train again.

Invariants: a group trains in at most `uses` steps, never when one of its episodes is staler than
`max_policy_lag`, and only if every one of its sequences passed the alignment check when it was new. What a
step draws depends on the seed, the step and the groups that trained before, so a resumed run, which records
the steps of its journal again, draws what it would have drawn; only the time limit goes by the clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tinkerscript.config import TrainingConfig
from tinkerscript.rollouts.advantages import RolloutGroup


@dataclass(slots=True)
class _Kept:
    group: RolloutGroup
    first_used: float
    """Unix time in seconds of the step that it was new in."""

    uses: int = 0


class ReplayBuffer:
    """At most `capacity` groups, oldest first."""

    def __init__(self, config: TrainingConfig, *, seed: int) -> None:
        self._config = config.replay
        self._number = config.replay.groups or config.groups_per_step
        self._seed = seed
        self._kept: dict[tuple[str, ...], _Kept] = {}
        """By the uuids of the group's episodes."""

        self._dropped = {"stale": 0, "expired": 0}
        """Groups that the last `drop` removed."""

    def drop(self, *, now: float, is_fresh: Callable[[RolloutGroup], bool]) -> None:
        """Remove what is too old: by the clock, or by its policy lag."""
        expired = [key for key, kept in self._kept.items() if now - kept.first_used > self._config.max_age_s]
        for key in expired:
            del self._kept[key]
        stale = [key for key, kept in self._kept.items() if not is_fresh(kept.group)]
        for key in stale:
            del self._kept[key]
        self._dropped = {"stale": len(stale), "expired": len(expired)}

    def draw(self, step: int) -> list[RolloutGroup]:
        """Groups to train on again in `step`, without replacement, newer ones more often than older ones."""
        # The n-th oldest has weight n ** recency: the largest of u ** (1 / weight) are a weighted sample
        # without replacement (Efraimidis and Spirakis 2006).
        uniform = random.Random(f"{self._seed}/{step}/replay")
        drawn = [
            (uniform.random() ** (1 / place**self._config.recency), key)
            for place, key in enumerate(self._kept, start=1)
        ]
        return [self._kept[key].group for _, key in sorted(drawn)[-self._number :]]

    def record(self, groups: Iterable[RolloutGroup], *, at: float) -> None:
        """These groups trained in a step at the Unix time `at`: those drawn for it, and new ones."""
        for group in groups:
            key = tuple(episode.episode_uuid for episode in group.episodes)
            kept = self._kept.setdefault(key, _Kept(group, at))
            kept.uses += 1
            if kept.uses >= self._config.uses:
                del self._kept[key]
        for key in list(self._kept)[: -self._config.capacity]:
            del self._kept[key]

    def metrics(self, drawn: Sequence[RolloutGroup]) -> dict[str, float]:
        """Of a step that used the groups `drawn`; names start with `replay/`."""
        found = {"groups": len(drawn), "kept": len(self._kept), **self._dropped}
        return {f"replay/{name}": float(value) for name, value in found.items()}
