"""Rollouts on disk: a JSON line each, and Inspect logs that `inspect view` shows.

Invariant: a process appends a group in one write to a file of its own, and a log appears when it is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalScore,
    EvalSpec,
    write_eval_log,
)
from inspect_ai.scorer import Score
from pydantic_core import to_json

from inspect_tinker_bridge.conversation import MODEL_NAME, to_dicts
from inspect_tinker_bridge.episodes import EpisodeOutcome


@dataclass(frozen=True)
class SavedRollout:
    """A scored episode with what its tokens were."""

    task: str
    batch: int | None
    outcome: EpisodeOutcome
    reward: float
    metrics: Mapping[str, float]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list[tuple[list[int], list[int]]])
    """Prompt ids and sampled ids of each action."""

    def as_json(self) -> dict[str, Any]:
        """The line of the file."""
        outcome = self.outcome
        return {
            "task": self.task,
            "batch": self.batch,
            "sample_id": outcome.sample_id,
            "reward": self.reward,
            "limit": outcome.limit,
            "scores": {name: _score(score) for name, score in outcome.scores.items()},
            "metrics": dict(self.metrics),
            "prompt_tokens": [len(prompt) for prompt, _ in self.turns],
            "sampled_tokens": [len(action) for _, action in self.turns],
            "conversation": to_dicts(outcome.messages),
        }


@dataclass(frozen=True)
class RolloutLog:
    """Where and how often rollouts are saved. Pickles; processes write files of their own."""

    folder: Path
    every: int = 1
    """Batches with an index that is a multiple of it are saved."""

    inspect_logs: bool = True
    """Whether each group becomes an Inspect log, beside the JSON lines."""

    def wants(self, batch: int | None) -> bool:
        """Whether the rollouts of that batch are saved."""
        return batch is None or batch % self.every == 0

    def save(self, rollouts: Sequence[SavedRollout]) -> None:
        """Append the episodes of a group, and write its Inspect log. Blocks for some milliseconds."""
        if not rollouts:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = b"".join(to_json(rollout.as_json(), fallback=repr) + b"\n" for rollout in rollouts)
        with (self.folder / f"rollouts-{os.getpid()}.jsonl").open("ab", buffering=0) as file:
            file.write(lines)
        if self.inspect_logs:
            write_inspect_log(self.folder / _log_name(rollouts[0].task), rollouts)


def write_inspect_log(path: Path, rollouts: Sequence[SavedRollout]) -> None:
    """An Inspect log (`.eval`) of the episodes: messages, events, scores; tokens and rewards in the metadata.

    Episodes of one sample are its epochs, in their order.
    """
    epochs: dict[int | str, int] = {}
    samples = []
    for rollout in rollouts:
        record = rollout.outcome.record
        if record is None:
            continue
        epoch = epochs[record.id] = epochs.get(record.id, 0) + 1
        seen = {
            "reward": rollout.reward,
            "batch": rollout.batch,
            "prompt_ids": [prompt for prompt, _ in rollout.turns],
            "sampled_ids": [action for _, action in rollout.turns],
        }
        update = {"epoch": epoch, "metadata": {**record.metadata, "rollout": seen}}
        samples.append(record.model_copy(update=update))
    spec = EvalSpec(
        created=datetime.now(UTC).isoformat(),
        run_id=uuid4().hex,
        task=rollouts[0].task,
        task_id=uuid4().hex,
        dataset=EvalDataset(samples=len(epochs)),
        model=MODEL_NAME,
        config=EvalConfig(epochs=max(epochs.values(), default=1)),
    )
    log = EvalLog(status="success", eval=spec, results=_mean_reward(rollouts), samples=samples)
    unfinished = path.with_name(f".{path.name}")
    write_eval_log(log, str(unfinished), format="eval")
    unfinished.rename(path)


def _mean_reward(rollouts: Sequence[SavedRollout]) -> EvalResults:
    mean = sum(rollout.reward for rollout in rollouts) / len(rollouts)
    score = EvalScore(name="reward", scorer="reward", metrics={"mean": EvalMetric(name="mean", value=mean)})
    return EvalResults(total_samples=len(rollouts), completed_samples=len(rollouts), scores=[score])


def read_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Every saved line, in no particular order between processes."""
    files = sorted(folder.glob("rollouts-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def _log_name(task: str) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in task)
    return f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}_{name}_{uuid4().hex[:12]}.eval"


def _score(score: Score) -> dict[str, Any]:
    return {"value": score.value, "answer": score.answer, "explanation": score.explanation}
