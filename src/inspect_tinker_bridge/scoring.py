"""From an episode's outcome to its reward.

Invariant: an outcome with an error, without a score, or with a score that is no number raises; it is never
a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from inspect_ai.scorer import CORRECT, INCORRECT, NOANSWER, PARTIAL, Value, value_to_float

from inspect_tinker_bridge.episodes import EpisodeOutcome
from inspect_tinker_bridge.errors import EnvironmentConfigError, TaskFailedError

_TO_FLOAT = value_to_float()
_WORDS = {CORRECT, INCORRECT, NOANSWER, PARTIAL, "yes", "no", "true", "false"}


@dataclass(frozen=True)
class EpisodeReward:
    """The reward of one episode and what it is made of."""

    reward: float
    """Weighted mean over the scorers; a scorer with several values counts with their mean."""

    values: dict[str, float]
    """Every value: `scorer` for a single one, `scorer/key` for a dict, `scorer/0` for a list."""


def score_episode(outcome: EpisodeOutcome, weights: Mapping[str, float] | None = None) -> EpisodeReward:
    """The reward of an outcome: values become floats as by Inspect's `value_to_float`, scorers are averaged.

    `weights` gives each scorer's weight by name (all of them, none negative, not all zero); equal if None.

    Raises TaskFailedError if the solver or a scorer raised, there is no score, or a value is not a finite
    number; EnvironmentConfigError if `weights` do not fit the scorers.
    """
    if outcome.error is not None:
        raise TaskFailedError(outcome.sample_id, outcome.error, outcome.traceback)
    if not outcome.scores:
        raise TaskFailedError(outcome.sample_id, "it ended without a score; does the task have a scorer?")
    values: dict[str, float] = {}
    means: dict[str, float] = {}
    for name, score in outcome.scores.items():
        parts = {key: _number(outcome, key, value) for key, value in _parts(name, score.value).items()}
        if not parts:
            raise TaskFailedError(outcome.sample_id, f"the scorer {name!r} gave an empty value")
        values.update(parts)
        means[name] = sum(parts.values()) / len(parts)
    return EpisodeReward(reward=_weighted_mean(means, weights), values=values)


def _parts(name: str, value: Value) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return {f"{name}/{key}": part for key, part in value.items()}
    if isinstance(value, str | int | float | bool):
        return {name: value}
    return {f"{name}/{index}": part for index, part in enumerate(value)}


def _number(outcome: EpisodeOutcome, key: str, value: object) -> float:
    number = math.nan
    if isinstance(value, int | float) or (isinstance(value, str) and _is_convertible(value)):
        number = _TO_FLOAT(value)
    if not math.isfinite(number):
        raise TaskFailedError(outcome.sample_id, f"the score {key!r} is {value!r}, not a finite number")
    return number


def _is_convertible(value: str) -> bool:
    """Whether `value_to_float` reads the text; what it cannot read it would call 0."""
    if value in _WORDS or value.lower() in _WORDS:
        return True
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _weighted_mean(means: Mapping[str, float], weights: Mapping[str, float] | None) -> float:
    if weights is None:
        return sum(means.values()) / len(means)
    if set(weights) != set(means):
        raise EnvironmentConfigError(f"weights name {sorted(weights)}, the scorers are {sorted(means)}")
    if any(not weight >= 0 for weight in weights.values()) or not sum(weights.values()) > 0:
        raise EnvironmentConfigError(f"weights must be at least 0 and not all 0, got {dict(weights)}")
    return sum(weights[name] * mean for name, mean in means.items()) / sum(weights.values())
