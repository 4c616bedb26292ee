"""Scores, rewards and reports of finished episodes.

A scorer that returns None does not count.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ModelName, ModelOutput
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
from inspect_tinker_bridge.conversion import from_dicts, sample_of_row
from inspect_tinker_bridge.episodes import MODEL_NAME, EpisodeOutcome
from inspect_tinker_bridge.errors import EnvironmentConfigError, TaskFailedError
from inspect_tinker_bridge.sandbox import Sandboxes, SandboxInstance, sandbox_context

__all__ = [
    "EpisodeReport",
    "EpisodeReward",
    "check_weights",
    "compute_reward",
    "report_of",
    "score_episode",
    "to_number",
]

_MAX_EXPLANATION = 2000

_TO_FLOAT = value_to_float()
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_INSTALLED = ("site-packages", sysconfig.get_path("stdlib"))
_WORDS = {CORRECT, INCORRECT, NOANSWER, PARTIAL, "yes", "no", "true", "false"}


@dataclass(frozen=True)
class EpisodeReward:
    reward: float
    """The weighted mean of the scores; each counts with the mean of its values."""

    values: dict[str, float]
    """`scorer` for a single value, `scorer/key` for a dict, `scorer/0` for a list."""

    correct: bool = False
    """Whether `reward` is at least 1."""


def check_weights(weights: Mapping[str, float], scorers: Collection[str]) -> None:
    """Raise EnvironmentConfigError unless exactly the scorers have weights: finite, at least 0, not all 0."""
    if set(weights) != set(scorers):
        raise EnvironmentConfigError(
            f"scorer_weights names {sorted(weights)}, but the scorers are {sorted(scorers)}"
        )
    _check_weight_values(weights)


def _check_weight_values(weights: Mapping[str, float]) -> None:
    numbers = [to_number(weight) for weight in weights.values()]
    if any(number is None or number < 0 for number in numbers) or not any(numbers):
        raise EnvironmentConfigError(f"weights must be at least 0 and not all 0, got {dict(weights)}")


def score_episode(outcome: EpisodeOutcome, weights: Mapping[str, float] | None = None) -> EpisodeReward:
    """Convert scores to floats as Inspect's `value_to_float` does, and average the scorers.

    `weights` are by scorer name, or equal if None; a missing score leaves its weight to the others. Raises
    TaskFailedError (with file and line) if the solver or a scorer raised, no score counts, or a number is not
    finite, and EnvironmentConfigError for a score without a weight.
    """
    if outcome.error is not None:
        cause = f"{outcome.error}{_place(outcome.traceback)}"
        raise TaskFailedError(outcome.sample_id, cause, outcome.traceback)
    values: dict[str, float] = {}
    means: dict[str, float] = {}
    for name, score in outcome.scores.items():
        parts = {
            key: _number(outcome, key, value, score.reason)
            for key, value in _parts(name, score.value).items()
            if value is not None
        }
        if not parts:
            raise TaskFailedError(outcome.sample_id, f"the scorer {name!r} returned an empty value")
        values.update(parts)
        means[name] = sum(parts.values()) / len(parts)
    mean = _weighted_mean(outcome, means, weights)
    if not math.isfinite(mean):
        raise TaskFailedError(outcome.sample_id, f"the mean of the scores {values} is not a finite number")
    return EpisodeReward(reward=mean, values=values, correct=mean >= 1.0)


@dataclass(frozen=True)
class EpisodeReport:
    metadata: dict[str, Any]
    """`sample_id`, `scores` (floats), `explanations` (each scorer's answer and explanation), `answer`,
    `limit` (the type, or None) and `tool_errors` (count by kind)."""

    metrics: dict[str, float]
    """`score/<scorer>`, `score/<scorer>/<key>`, `limit/<kind>` and `tool_error/<kind>`."""


def report_of(
    outcome: EpisodeOutcome, scored: EpisodeReward, unapplied: Collection[str] = ()
) -> EpisodeReport:
    replies = (message.text for message in reversed(outcome.messages) if message.role == "assistant")
    explained = {
        name: {
            "answer": score.answer and _writable(score.answer),
            "explanation": _writable((score.explanation or "")[:_MAX_EXPLANATION]),
        }
        for name, score in outcome.scores.items()
    }
    tool_errors = Counter(
        message.error.type for message in outcome.messages if message.role == "tool" and message.error
    )
    metrics = {f"score/{name}": value for name, value in scored.values.items()}
    if outcome.limit is not None:
        metrics[f"limit/{outcome.limit}"] = 1.0
    metrics |= {f"tool_error/{kind}": float(count) for kind, count in tool_errors.items()}
    metadata: dict[str, Any] = {
        "sample_id": outcome.sample_id,
        "scores": dict(scored.values),
        "explanations": explained,
        "answer": _writable(outcome.completion or next(replies, "")),
        "limit": outcome.limit,
        "tool_errors": dict(tool_errors),
    }
    if unapplied:
        metadata["unapplied"] = sorted(unapplied)
    return EpisodeReport(metadata, metrics)


def _writable(text: str) -> str:
    # A model may write `"\ud800"` in JSON, which UTF-8 cannot encode.
    return text.encode(errors="replace").decode()


async def compute_reward(
    conversation: Sequence[ChatMessage | Mapping[str, Any]],
    info: Sample | Mapping[str, Any] | str,
    scorers: Sequence[Scorer],
    sandbox_envs: SandboxInstance | Sandboxes | None = None,
    weights: Sequence[float] | Mapping[str, float] | None = None,
) -> tuple[float, dict[str, float]]:
    """Score a finished conversation with Inspect scorers, without an episode.

    Returns the reward and every value by name, as in `EpisodeReward`. `conversation` has Inspect messages, or
    dictionaries in OpenAI's chat format; the last submitted answer is scored, or else the last assistant
    message. `info` is the sample or a row of `inspect_dataset_to_hf`. `weights` are in the scorers' order, or
    by name. Raises TaskFailedError if a scorer raises or no score is usable, and EnvironmentConfigError for
    missing scorers or weights that do not match.
    """
    if not scorers:
        raise EnvironmentConfigError("there are no scorers; pass at least one")
    sample = info if isinstance(info, Sample) else sample_of_row(info)
    state = _final_state(sample, _messages(conversation))
    named = dict(zip(_inspect_private.scorer_names(scorers), scorers, strict=True))
    if weights is not None and not isinstance(weights, Mapping):
        if len(weights) != len(named):
            raise EnvironmentConfigError(f"{len(weights)} weights for {len(named)} scorers")
        weights = dict(zip(named, weights, strict=True))
    if weights is not None:
        check_weights(weights, named)
    async with nullcontext() if sandbox_envs is None else sandbox_context(sandbox_envs):
        given = [(name, await _score(name, scorer, state)) for name, scorer in named.items()]
    scores = {name: score for name, score in given if score is not None}
    outcome = EpisodeOutcome(state.sample_id, scores, error=None, limit=None, messages=state.messages)
    scored = score_episode(outcome, weights)
    return scored.reward, scored.values


def to_number(value: object) -> float | None:
    """Converts numbers, bools, and scalars of NumPy or torch; None unless finite."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__") or getattr(value, "ndim", 0) != 0:
        return None
    scalar: Any = value
    try:
        number = float(scalar.item() if hasattr(scalar, "item") else scalar)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _shown(value: object) -> str:
    # `repr` refuses integers of thousands of digits.
    try:
        return repr(value)[:200]
    except ValueError:
        return f"a value of type {type(value).__name__} that is too large to show"


def _place(traceback: str) -> str:
    # Prefer code that is not installed.
    frames = _FRAME.findall(traceback)
    own = [frame for frame in frames if not any(each in frame[0] for each in _INSTALLED)]
    return " ({}, line {})".format(*(own or frames)[-1]) if frames else ""


async def _score(name: str, scorer: Scorer, state: TaskState) -> Score | None:
    try:
        return await scorer(state, state.target)
    except Exception as error:
        raise TaskFailedError(state.sample_id, f"the scorer {name!r} raised {error!r}") from error


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
        output=_final_output(messages),
        metadata=dict(sample.metadata or {}),
        completed=True,
    )
    if sample.choices:
        _inspect_private.mark_choices(state)
    return state


def _final_output(messages: Sequence[ChatMessage], submit: str = "submit") -> ModelOutput:
    replies = [message for message in messages if isinstance(message, ChatMessageAssistant)]
    if not replies:
        return ModelOutput(model=MODEL_NAME)
    output = ModelOutput.from_message(replies[-1].model_copy())
    submissions = [call for call in replies[-1].tool_calls or [] if call.function == submit]
    if submissions:
        output.completion = str(submissions[-1].arguments.get("answer", ""))
    return output


def _parts(name: str, value: Value) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return {f"{name}/{key}": part for key, part in value.items()}
    if isinstance(value, str | int | float | bool):
        return {name: value}
    return {f"{name}/{index}": part for index, part in enumerate(value)}


def _number(outcome: EpisodeOutcome, key: str, value: object, reason: str | None) -> float:
    if isinstance(value, str):
        number = _TO_FLOAT(value) if _is_convertible(value) else None
    else:
        number = to_number(value)
    if number is None:
        why = f" ({reason})" if reason else ""
        cause = f"the score {key!r} is {_shown(value)}, not a finite number{why}"
        if isinstance(value, str):
            cause += (
                "; numbers, yes, no, and the values of Inspect such as CORRECT and PARTIAL count: for other "
                "words, wrap the scorer in one of yours that gives each a number"
            )
        raise TaskFailedError(outcome.sample_id, cause)
    return number


def _is_convertible(value: str) -> bool:
    # `value_to_float` turns unknown texts into 0.
    if value in _WORDS or value.lower() in _WORDS:
        return True
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _weighted_mean(
    outcome: EpisodeOutcome, means: Mapping[str, float], weights: Mapping[str, float] | None
) -> float:
    if not means:
        raise TaskFailedError(outcome.sample_id, "it ended without a score; check that the task has a scorer")
    if weights is None:
        weights = dict.fromkeys(means, 1.0)
    elif unweighted := sorted(set(means) - set(weights)):
        raise EnvironmentConfigError(
            f"scorer_weights names {sorted(weights)}, and has no weight for the score {unweighted[0]!r}"
        )
    else:
        _check_weight_values(weights)
    total = sum(weights[name] for name in means)
    if not total > 0:
        raise TaskFailedError(outcome.sample_id, f"all of its scores have the weight 0: {sorted(means)}")
    return sum(weights[name] * mean for name, mean in means.items()) / total
