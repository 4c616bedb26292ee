"""`Curriculum`: skips samples that teach little, by the run's own pass rates (docs/training.md#a-curriculum).

Choices depend only on the seed, the position and earlier groups, so a resumed run repeats them.
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

# Hopeless below this pass rate, solved above 1 minus it.
RETIRED_BELOW = 0.05

# Share of retired samples to ask, because their rates move.
REVISIT = 0.1

# Smallest weight of an open sample, which is 4 p (1 - p) at pass rate p.
LEAST = 0.25

NEWEST_GROUP = 0.5


@dataclass
class Curriculum:
    config: CurriculumConfig
    seed: int
    rates: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self._passed_over = 0

    def admits(self, position: int, payload: Mapping[str, Any]) -> bool:
        uniform = random.Random(f"{self.seed}/{position}/curriculum").random()
        admitted = uniform < self._weight(self.rates.get(key_of(payload)))
        self._passed_over += not admitted
        return admitted

    def note(self, payload: Mapping[str, Any], outcomes: Iterable[Outcome | None]) -> None:
        accepted = [each for each in outcomes if isinstance(each, EpisodeAccepted)]
        passed = [passes(each, self.config.pass_reward) for each in accepted]
        if not passed:
            return
        key, rate = key_of(payload), sum(passed) / len(passed)
        self.rates[key] = rate + (1 - NEWEST_GROUP) * (self.rates.get(key, rate) - rate)

    def state(self) -> bytes:
        return msgspec.json.encode(self.rates)

    def restore(self, state: bytes) -> None:
        self.rates = msgspec.json.decode(state, type=dict[str, float])

    def metrics(self, _: object) -> dict[str, float]:
        pools = Counter(map(pool_of, self.rates.values()))
        found = {f"curriculum/{name}": float(pools[name]) for name in ("open", "solved", "hopeless")}
        found["curriculum/passed_over"], self._passed_over = float(self._passed_over), 0
        return found

    def _weight(self, rate: float | None) -> float:
        if rate is None:
            return 1.0
        return max(LEAST, 4 * rate * (1 - rate)) if pool_of(rate) == "open" else REVISIT


def pool_of(rate: float) -> Pool:
    if rate < RETIRED_BELOW:
        return "hopeless"
    return "solved" if rate > 1 - RETIRED_BELOW else "open"


def key_of(payload: Mapping[str, Any]) -> str:
    return f"{payload['task']}\n{payload['sample'].get('id')}"
