"""`Curriculum`: which samples are asked, by the pass rates that the run itself has seen.

The order of samples stays what it is without a curriculum; samples that teach little are passed over in it. A
sample is asked until a step has taken a group of it. Then it is `open` while some attempts pass and some do
not, and retired as `solved` or `hopeless` while its rate is near 1 or 0. From a retired pool it is asked now
and then, and is open again if its rate has moved.

Invariants: whether a position is asked depends on the seed, the position and the groups that steps have taken
before, and nothing else. The rates are in every checkpoint, so that a resumed run asks what it would have
asked.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tinkerscript.config import CurriculumConfig
from tinkerscript.train.pass_rates import passes
from tinkerscript.trainer_link.messages import EpisodeAccepted, Outcome

Pool = Literal["open", "solved", "hopeless"]

RETIRED_BELOW = 0.05
"""Pass rate below which a sample is hopeless; above 1 minus it, it is solved."""

REVISIT = 0.1
"""Share of the positions of retired samples that are asked all the same: a policy that learns moves them."""

LEAST = 0.25
"""Smallest weight of an open sample. Its weight is 4 p (1 - p), the variance of a pass at the rate p, as a
share of the largest."""

NEWEST_GROUP = 0.5
"""Weight of a sample's newest group in its rate."""


@dataclass
class Curriculum:
    """The pass rates of a run's samples."""

    config: CurriculumConfig
    seed: int
    rates: dict[str, float] = field(default_factory=dict[str, float])
    """By `key_of` of the sample's payload, of those of which a group has trained."""

    def __post_init__(self) -> None:
        self._passed_over = 0
        """Positions since the last metrics."""

    def admits(self, position: int, payload: Mapping[str, Any]) -> bool:
        """Whether the sample at a position is asked."""
        uniform = random.Random(f"{self.seed}/{position}/curriculum").random()
        admitted = uniform < self._weight(self.rates.get(key_of(payload)))
        self._passed_over += not admitted
        return admitted

    def note(self, payload: Mapping[str, Any], outcomes: Iterable[Outcome | None]) -> None:
        """A step took a group of this sample."""
        accepted = [each for each in outcomes if isinstance(each, EpisodeAccepted)]
        passed = [passes(each, self.config.pass_reward) for each in accepted]
        if not passed:
            return
        key, rate = key_of(payload), sum(passed) / len(passed)
        self.rates[key] = rate + (1 - NEWEST_GROUP) * (self.rates.get(key, rate) - rate)

    def state(self) -> bytes:
        """For a checkpoint, as JSON."""
        return msgspec.json.encode(self.rates)

    def restore(self, state: bytes) -> None:
        self.rates = msgspec.json.decode(state, type=dict[str, float])

    def metrics(self, _: object) -> dict[str, float]:
        """How many samples are in each pool, and how many positions were passed over since the last step."""
        pools = Counter(map(pool_of, self.rates.values()))
        found = {f"curriculum/{name}": float(pools[name]) for name in ("open", "solved", "hopeless")}
        found["curriculum/passed_over"], self._passed_over = float(self._passed_over), 0
        return found

    def _weight(self, rate: float | None) -> float:
        if rate is None:
            return 1.0
        return max(LEAST, 4 * rate * (1 - rate)) if pool_of(rate) == "open" else REVISIT


def pool_of(rate: float) -> Pool:
    """The pool of a sample with this pass rate."""
    if rate < RETIRED_BELOW:
        return "hopeless"
    return "solved" if rate > 1 - RETIRED_BELOW else "open"


def key_of(payload: Mapping[str, Any]) -> str:
    """Names a sample among all tasks of the run."""
    return f"{payload['task']}\n{payload['sample'].get('id')}"
