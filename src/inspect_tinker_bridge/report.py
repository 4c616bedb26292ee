"""What is told of a scored episode beside its reward: for results, metrics and logs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from inspect_tinker_bridge.episodes import EpisodeOutcome
from inspect_tinker_bridge.scoring import EpisodeReward

_EXPLANATION = 2000
"""Characters of a scorer's explanation that are kept."""


@dataclass(frozen=True)
class EpisodeReport:
    """One episode, told in plain JSON values."""

    metadata: dict[str, Any]
    """`sample_id`, `scores` (every value, as floats), `explanations` (each scorer's answer and explanation),
    `answer`, `limit` (type of the limit that ended it, or None) and `tool_errors` (how many of each kind)."""

    metrics: dict[str, float]
    """`score/<scorer>`, `score/<scorer>/<key>`, `limit/<kind>` and `tool_error/<kind>`."""


def report_of(outcome: EpisodeOutcome, scored: EpisodeReward) -> EpisodeReport:
    """Tell an episode by its outcome and its reward."""
    said = (message.text for message in reversed(outcome.messages) if message.role == "assistant")
    explained = {
        name: {"answer": score.answer, "explanation": (score.explanation or "")[:_EXPLANATION]}
        for name, score in outcome.scores.items()
    }
    tool_errors = Counter(
        message.error.type for message in outcome.messages if message.role == "tool" and message.error
    )
    metrics = {f"score/{name}": value for name, value in scored.values.items()} | scored.metrics
    if outcome.limit is not None:
        metrics[f"limit/{outcome.limit}"] = 1.0
    metrics |= {f"tool_error/{kind}": float(count) for kind, count in tool_errors.items()}
    metadata: dict[str, Any] = {
        "sample_id": outcome.sample_id,
        "scores": dict(scored.values),
        "explanations": explained,
        "answer": outcome.completion or next(said, ""),
        "limit": outcome.limit,
        "tool_errors": dict(tool_errors),
    }
    return EpisodeReport(metadata, metrics)
