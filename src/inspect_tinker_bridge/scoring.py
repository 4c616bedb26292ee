"""From an episode's outcome to its reward.

Invariant: an outcome with an error, without a score, or with a score that is no number raises; it is never
a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ModelName
from inspect_ai.scorer import (
    CORRECT,
    INCORRECT,
    NOANSWER,
    PARTIAL,
    Score,
    Scorer,
    Target,
    Value,
    value_to_float,
)
from inspect_ai.solver import TaskState

from inspect_tinker_bridge import _inspect_private
from inspect_tinker_bridge.conversation import MODEL_NAME, final_output, from_dicts
from inspect_tinker_bridge.episodes import EpisodeOutcome
from inspect_tinker_bridge.errors import EnvironmentConfigError, TaskFailedError
from inspect_tinker_bridge.samples import sample_of_row
from inspect_tinker_bridge.sandbox import Sandboxes, SandboxInstance, sandbox_context

_TO_FLOAT = value_to_float()
_WORDS = {CORRECT, INCORRECT, NOANSWER, PARTIAL, "yes", "no", "true", "false"}


@dataclass(frozen=True)
class EpisodeReward:
    """The reward of one episode and what it is made of."""

    reward: float
    """Weighted mean over the scorers; a scorer with several values counts with their mean."""

    values: dict[str, float]
    """Every value: `scorer` for a single one, `scorer/key` for a dict, `scorer/0` for a list."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What a custom reward function reports: `reward/name`."""


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


async def compute_reward(
    conversation: Sequence[ChatMessage | Mapping[str, Any]],
    info: Sample | Mapping[str, Any] | str,
    scorers: Sequence[Scorer],
    sandbox_envs: SandboxInstance | Sandboxes | None = None,
    weights: Sequence[float] | Mapping[str, float] | None = None,
) -> tuple[float, dict[str, float]]:
    """Score a finished conversation with Inspect scorers, without an episode: the reward and every value.

    `conversation` is Inspect's messages or dictionaries in OpenAI's chat format; an answer given to `submit`
    is what is scored. `info` is the sample, or a row of `inspect_dataset_to_hf`. Scorers that read a sandbox
    get `sandbox_envs`. `weights` are in the order of `scorers`, or by name.

    Raises TaskFailedError, from the cause, if a scorer raises or gives no usable score, and
    EnvironmentConfigError for no scorers or weights that do not fit.
    """
    if not scorers:
        raise EnvironmentConfigError("there are no scorers: a reward needs one")
    sample = info if isinstance(info, Sample) else sample_of_row(info)
    state = _final_state(sample, _messages(conversation))
    named = dict(zip(_inspect_private.scorer_names(scorers), scorers, strict=True))
    if weights is not None and not isinstance(weights, Mapping):
        if len(weights) != len(named):
            raise EnvironmentConfigError(f"{len(weights)} weights for {len(named)} scorers")
        weights = dict(zip(named, weights, strict=True))
    async with nullcontext() if sandbox_envs is None else sandbox_context(sandbox_envs):
        scores = {name: await _score(name, scorer, state) for name, scorer in named.items()}
    outcome = EpisodeOutcome(state.sample_id, scores, error=None, limit=None, messages=state.messages)
    scored = score_episode(outcome, weights)
    return scored.reward, scored.values


async def _score(name: str, scorer: Scorer, state: TaskState) -> Score:
    try:
        score = await scorer(state, state.target)
    except Exception as error:
        raise TaskFailedError(state.sample_id, f"the scorer {name!r} raised {error!r}") from error
    if score is None:
        raise TaskFailedError(state.sample_id, f"the scorer {name!r} gave no score")
    return score


def _messages(conversation: Sequence[ChatMessage | Mapping[str, Any]]) -> list[ChatMessage]:
    return [from_dicts([message])[0] if isinstance(message, Mapping) else message for message in conversation]


def _final_state(sample: Sample, messages: list[ChatMessage]) -> TaskState:
    state = TaskState(
        model=ModelName(MODEL_NAME),
        sample_id=sample.id if sample.id is not None else 1,
        epoch=1,
        input=sample.input,
        messages=messages,
        target=Target(sample.target),
        choices=sample.choices,
        output=final_output(messages),
        metadata=dict(sample.metadata or {}),
        completed=True,
    )
    if sample.choices:
        _inspect_private.mark_choices(state)
    return state


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
