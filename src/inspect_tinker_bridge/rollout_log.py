"""Rollouts on disk: JSON lines, and Inspect logs for `inspect view`.

Invariants: a process appends a group in one write to its own file, and a log appears only when it is
complete. Logging never ends training: a `RolloutLog` that cannot work is refused when it is made, and what
cannot be saved later is left out, with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
    EvalSample,
    EvalScore,
    EvalSpec,
    write_eval_log,
)
from inspect_ai.scorer import Score
from pydantic_core import to_json

from inspect_tinker_bridge.conversion import to_dicts
from inspect_tinker_bridge.episodes import MODEL_NAME, EpisodeOutcome
from inspect_tinker_bridge.errors import EnvironmentConfigError, require_counts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedRollout:
    """An episode that ended, and its tokens."""

    task: str
    batch: int | None
    outcome: EpisodeOutcome
    reward: float | None
    """None for an episode that failed."""

    metrics: Mapping[str, float]
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list[tuple[list[int], list[int]]])
    """Prompt ids and sampled ids of each action."""

    failure: str | None = None
    """Why the episode has no reward; None if it has one."""

    def as_json(self) -> dict[str, Any]:
        """One line of the JSON file. Raises UnsupportedError for messages that cannot be stored."""
        outcome = self.outcome
        return {
            "task": self.task,
            "batch": self.batch,
            "sample_id": outcome.sample_id,
            "reward": self.reward,
            "failure": self.failure,
            "limit": outcome.limit,
            "scores": {name: _score(score) for name, score in outcome.scores.items()},
            "metrics": dict(self.metrics),
            "prompt_tokens": [len(prompt) for prompt, _ in self.turns],
            "sampled_tokens": [len(action) for _, action in self.turns],
            "conversation": to_dicts(outcome.messages),
        }


@dataclass(frozen=True)
class RolloutLog:
    """Where and how often to save rollouts, failed ones too. Pickles; each process writes its own files."""

    folder: Path
    """Created if it does not exist; kept as an absolute path."""

    every: int = 1
    """Batches whose index is a multiple of this are saved."""

    inspect_logs: bool = True
    """Whether to write an Inspect log for each group as well."""

    def __post_init__(self) -> None:
        """Raises EnvironmentConfigError if `every` is below 1 or `folder` cannot be written to."""
        require_counts(every=self.every)
        folder = Path(self.folder).expanduser().absolute()
        object.__setattr__(self, "folder", folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise EnvironmentConfigError(f"the rollout log cannot be written to {folder}: {error}") from error

    def wants(self, batch: int | None) -> bool:
        """Whether to save the rollouts of that batch."""
        return batch is None or batch % self.every == 0

    def save(self, rollouts: Sequence[SavedRollout]) -> None:
        """Append a group's episodes and write its Inspect log. Blocks for a few milliseconds.

        Never raises: what cannot be saved is left out, and the first time of each kind is a warning.
        """
        if not rollouts:
            return
        self._attempt("the rollouts", lambda: self._append(rollouts))
        if self.inspect_logs:
            path = self.folder / _log_name(rollouts[0].task)
            self._attempt("an Inspect log", lambda: write_inspect_log(path, rollouts))

    def _append(self, rollouts: Sequence[SavedRollout]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = b"".join(self._line(rollout) + b"\n" for rollout in rollouts)
        with (self.folder / f"rollouts-{os.getpid()}.jsonl").open("ab", buffering=0) as file:
            file.write(lines)

    def _line(self, rollout: SavedRollout) -> bytes:
        """The rollout as JSON, or what is certain about it and why there is no more."""
        try:
            return to_json(rollout.as_json(), fallback=repr)
        except Exception as error:  # noqa: BLE001 (solvers and scorers put anything into messages and scores)
            self._warn("a rollout", error)
            known = {"task": rollout.task, "batch": rollout.batch, "sample_id": rollout.outcome.sample_id}
            why = {"reward": rollout.reward, "failure": rollout.failure, "not_saved": repr(error)}
            return json.dumps(known | why).encode()

    def _attempt(self, what: str, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 (a full disk, a value that no format holds)
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        if (self.folder, what) not in _WARNED:
            _WARNED.add((self.folder, what))
            logger.warning(
                "%s could not be saved to %s: %r; training goes on, and there is no further warning",
                *(what, self.folder, error),
            )


_WARNED: set[tuple[Path, str]] = set()
"""What this process has warned about."""


def write_inspect_log(path: Path, rollouts: Sequence[SavedRollout]) -> None:
    """Write an Inspect log (`.eval`): messages, events and scores, with tokens and rewards in the metadata.

    Episodes of one sample become its epochs, in order.
    """
    epochs: dict[int | str, int] = {}
    samples: list[EvalSample] = []
    for rollout in rollouts:
        record = rollout.outcome.record
        if record is None:
            continue
        epoch = epochs[record.id] = epochs.get(record.id, 0) + 1
        seen = {
            "reward": rollout.reward,
            "failure": rollout.failure,
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
    try:
        write_eval_log(log, str(unfinished), format="eval")
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _mean_reward(rollouts: Sequence[SavedRollout]) -> EvalResults:
    """The mean of the episodes that have a reward."""
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    scores: list[EvalScore] = []
    if rewards:
        mean = EvalMetric(name="mean", value=sum(rewards) / len(rewards))
        scores.append(EvalScore(name="reward", scorer="reward", metrics={"mean": mean}))
    return EvalResults(total_samples=len(rollouts), completed_samples=len(rewards), scores=scores)


def read_rollouts(folder: Path) -> list[dict[str, Any]]:
    """Read every saved line, in no particular order across processes."""
    files = sorted(folder.glob("rollouts-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def _log_name(task: str) -> str:
    name = "".join(letter if letter.isalnum() else "-" for letter in task)
    return f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}_{name}_{uuid4().hex[:12]}.eval"


def _score(score: Score) -> dict[str, Any]:
    return {"value": score.value, "answer": score.answer, "explanation": score.explanation}
