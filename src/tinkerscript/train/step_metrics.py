"""What the episodes of a step say of themselves, as metrics: scores, limits hit, kinds of errors. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tinkerscript.train.journal import EpisodeAccepted, EpisodeFailed, Outcome

_COUNTED = ("limit/", "tool_error/")
"""Metrics of an episode that are absent where they would be 0: they are added up."""


def reported(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """`episode/<metric>`: the mean of each `log_metrics` value over the episodes that report it.

    `limit/<kind>` and `tool_error/<kind>`: how many, in all; `failure/<kind>`: failed episodes by the kind of
    their last failure.
    """
    values: dict[str, list[float]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if isinstance(outcome, EpisodeFailed):
            kind = outcome.failures[-1].get("kind") if outcome.failures else None
            counts[f"failure/{kind or 'unknown'}"] += 1
            continue
        for name, value in outcome.log_metrics.items():
            values[name].append(value)
    metrics = {name: float(number) for name, number in counts.items()}
    for name, found in values.items():
        if name.startswith(_COUNTED):
            metrics[name] = sum(found)
        else:
            metrics[f"episode/{name}"] = sum(found) / len(found)
    return metrics


def by_task(
    outcomes: Iterable[Outcome], task_of: Mapping[str, str], name: str, *, tasks: Sequence[str]
) -> dict[str, float]:
    """`<name>/<task>`: the mean reward of each task's accepted episodes, where the run has several `tasks`.

    `task_of` has the task of each episode by its uuid; a task without accepted episodes has no mean.
    """
    if len(tasks) < 2:
        return {}
    rewards: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if isinstance(outcome, EpisodeAccepted) and outcome.episode_uuid in task_of:
            rewards[task_of[outcome.episode_uuid]].append(outcome.reward)
    return {f"{name}/{task}": sum(found) / len(found) for task, found in rewards.items()}
