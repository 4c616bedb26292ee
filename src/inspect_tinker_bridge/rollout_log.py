"""Rollouts on disk: JSON lines, and Inspect logs for `inspect view`.

Invariant: a process appends a group in one write to its own file, and a log appears only when it is complete.
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

from inspect_tinker_bridge.conversion import to_dicts
from inspect_tinker_bridge.episodes import MODEL_NAME, EpisodeOutcome


@dataclass(frozen=True)
class SavedRollout:
    """A scored episode and its tokens."""

    task: str
    batch: int | None
    outcome: EpisodeOutcome
    reward: float
    metrics: Mapping[str, float]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list[tuple[list[int], list[int]]])
    """Prompt ids and sampled ids of each action."""

    def as_json(self) -> dict[str, Any]:
        """One line of the JSON file."""
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
    """Where and how often to save rollouts. Pickles; each process writes its own files."""

    folder: Path
    every: int = 1
    """Batches whose index is a multiple of this are saved."""

    inspect_logs: bool = True
    """Whether to write an Inspect log for each group as well."""

    def wants(self, batch: int | None) -> bool:
        """Whether to save the rollouts of that batch."""
        return batch is None or batch % self.every == 0

    def save(self, rollouts: Sequence[SavedRollout]) -> None:
        """Append a group's episodes and write its Inspect log. Blocks for a few milliseconds."""
        if not rollouts:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = b"".join(to_json(rollout.as_json(), fallback=repr) + b"\n" for rollout in rollouts)
        with (self.folder / f"rollouts-{os.getpid()}.jsonl").open("ab", buffering=0) as file:
            file.write(lines)
        if self.inspect_logs:
            write_inspect_log(self.folder / _log_name(rollouts[0].task), rollouts)


def write_inspect_log(path: Path, rollouts: Sequence[SavedRollout]) -> None:
    """Write an Inspect log (`.eval`): messages, events and scores, with tokens and rewards in the metadata.

    Episodes of one sample become its epochs, in order.
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
    """Read every saved line, in no particular order across processes."""
    files = sorted(folder.glob("rollouts-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def _log_name(task: str) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in task)
    return f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}_{name}_{uuid4().hex[:12]}.eval"


def _score(score: Score) -> dict[str, Any]:
    return {"value": score.value, "answer": score.answer, "explanation": score.explanation}
