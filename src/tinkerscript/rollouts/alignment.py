"""The alignment report: is what would train exactly what was sampled?

`find_errors` looks at one rollout; a rollout with an error does not train. `AlignmentReport` counts
over a run and compares the trainer's log probabilities with the sampler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.types import Episode, Rollout, Segment

POSITIVE_TOLERANCE = 1e-6
"""Log probabilities above this are errors; below it, rounding."""

SENTINEL_LOGPROB = -9999.0
"""Servers that cannot send -inf send this instead."""


def find_errors(rollout: Rollout, *, vocabulary: int) -> list[str]:
    """The names of what is wrong with a rollout; empty if it may train."""
    errors: list[str] = []
    if not rollout.sampled.any():
        errors.append("nothing_sampled")
    if rollout.tokens.min() < 0 or rollout.tokens.max() >= vocabulary:
        errors.append("id_out_of_range")
    errors += _logprob_errors(rollout.logprobs[rollout.sampled])
    errors += _segment_errors(rollout)
    return errors


def _logprob_errors(logprobs: FloatArray) -> list[str]:
    errors: list[str] = []
    if not np.isfinite(logprobs).all():
        errors.append("logprob_not_finite")
    if (logprobs > POSITIVE_TOLERANCE).any():
        errors.append("logprob_positive")
    if len(logprobs) > 1 and (logprobs == 0).all():
        errors.append("logprobs_all_zero")
    if (logprobs <= SENTINEL_LOGPROB).any():
        errors.append("logprob_sentinel")
    return errors


def _segment_errors(rollout: Rollout) -> list[str]:
    covered = np.zeros(len(rollout.tokens), dtype=np.bool_)
    errors: set[str] = set()
    for segment in rollout.segments:
        covered[segment.start : segment.end] = True
        errors |= _temperature_errors(segment)
        if not np.array_equal(rollout.tokens[segment.start : segment.end], segment.call.sampled_ids):
            errors.add("tokens_differ_from_call")
    if (covered != rollout.sampled).any():
        errors.add("mask_differs_from_calls")
    return sorted(errors)


def _temperature_errors(segment: Segment) -> set[str]:
    """The trainer's log probabilities are those of temperature 1; others cannot be compared with them."""
    call = segment.call
    if call.temperature == 1:
        return set()
    return {"raw_logprobs_at_temperature" if call.logprob_kind == "raw" else "temperature_not_one"}


@dataclass
class AlignmentReport:
    """Counts over a run. Written to the run folder and shown at its end."""

    episodes: int = 0
    sequences: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    tokens_total: int = 0
    errors: Counter[str] = field(default_factory=Counter[str])
    breaks: Counter[str] = field(default_factory=Counter[str])
    max_abs_dlogp: float = 0.0
    """Largest |trainer - sampler| log probability of a trained token at policy lag 0."""

    def add_episode(self, episode: Episode) -> None:
        self.episodes += 1
        self.sequences += len(episode.rollouts)
        self.breaks.update(call.break_cause for call in episode.calls if call.break_cause)
        for rollout in episode.rollouts:
            self.tokens_sampled += int(rollout.sampled.sum())
            self.tokens_total += len(rollout.tokens)

    def add_errors(self, errors: list[str]) -> None:
        self.errors.update(errors)

    def add_trained(self, rollout: Rollout, trainer_logprobs: FloatArray, *, at_lag_0: bool = True) -> float:
        """Compare the trainer's log probabilities, float32 [T], with the sampler's: the largest gap."""
        gap = float(np.abs(trainer_logprobs - rollout.logprobs)[rollout.sampled].max())
        self.tokens_trained += int(rollout.sampled.sum())
        if at_lag_0:
            self.max_abs_dlogp = max(self.max_abs_dlogp, gap)
        return gap

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AlignmentReport:
        """The report that `as_json` wrote; an empty one for an empty mapping."""
        known: dict[str, Any] = {n: value for n, value in data.items() if n in cls.__dataclass_fields__}
        for name in ("errors", "breaks"):
            known[name] = Counter[str](known.get(name, {}))
        return cls(**known)

    @property
    def sequences_per_episode(self) -> float:
        return self.sequences / self.episodes if self.episodes else 0.0

    def as_json(self) -> dict[str, object]:
        return {
            "episodes": self.episodes,
            "sequences": self.sequences,
            "sequences_per_episode": self.sequences_per_episode,
            "tokens_sampled": self.tokens_sampled,
            "tokens_trained": self.tokens_trained,
            "tokens_total": self.tokens_total,
            "errors": dict(self.errors),
            "breaks": dict(self.breaks),
            "max_abs_dlogp": self.max_abs_dlogp,
        }
