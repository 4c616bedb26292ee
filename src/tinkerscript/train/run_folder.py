"""`RunFolder`: the files of one run, and nothing else that writes there from the trainer.

config.yaml  metrics.jsonl  journal.jsonl  alignment.json  summary.json  learning_curve.png
policy_version  rollouts/step_0001.jsonl  checkpoints/final/  logs/
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tinker_cookbook.utils.ml_log import JsonLogger
from tokenizers import Tokenizer

from tinkerscript.config import RunConfig, dump_config, model_folder
from tinkerscript.errors import ConfigError
from tinkerscript.rollouts.types import Episode, RolloutGroup
from tinkerscript.train.journal import EpisodeAccepted, EpisodeFailed, Outcome

RUNS = Path("runs")
"""Where `experiment_dir: auto` makes its folders."""


class RunFolder:
    """A new folder for `config`. Raises ConfigError if it holds a run already."""

    def __init__(self, config: RunConfig, *, now: datetime) -> None:
        self._tokenizer: Any = Tokenizer.from_file(str(model_folder(config.engine.model) / "tokenizer.json"))
        self.path = _folder_of(config, now)
        if _size(self.path / "journal.jsonl"):
            raise ConfigError(
                f"experiment_dir: {self.path} holds a run already; name another folder, or use 'auto'"
            )
        for name in ("rollouts", "checkpoints", "logs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        self._metrics = JsonLogger(self.path)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line to metrics.jsonl."""
        self._metrics.log_metrics(dict(metrics), step)

    def write_rollouts(
        self, name: str, groups: Sequence[RolloutGroup], outcomes: Mapping[str, Outcome]
    ) -> None:
        """One readable JSON line for every episode of a step, failed ones included."""
        lines = [
            self._readable(group, episode, advantage)
            for group in groups
            for episode, advantage in zip(group.episodes, group.advantages().tolist(), strict=True)
        ]
        seen = {line["episode_uuid"] for line in lines}
        lines += [_left_out(outcome) for uuid, outcome in outcomes.items() if uuid not in seen]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (self.path / "rollouts" / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def _readable(self, group: RolloutGroup, episode: Episode, advantage: float) -> dict[str, Any]:
        return {
            "group_id": group.group_id,
            "episode_uuid": episode.episode_uuid,
            "reward": episode.reward,
            "advantage": advantage,
            "policy_versions": sorted({call.policy_version for call in episode.calls}),
            "sequences": [
                {
                    "text": self._tokenizer.decode(rollout.tokens.tolist(), skip_special_tokens=False),
                    "tokens": len(rollout.tokens),
                    "sampled": int(rollout.sampled.sum()),
                    "mean_logprob": float(rollout.logprobs[rollout.sampled].mean()),
                }
                for rollout in episode.rollouts
            ],
            "metadata": episode.metadata,
        }

    def write_json(self, name: str, data: Mapping[str, object]) -> None:
        """Write a JSON file whole or not at all."""
        partial = self.path / f".{name}.partial"
        partial.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path / name)

    def publish_as_latest(self) -> None:
        """Copy what people look at to `runs/latest/`, where scripts and links find it."""
        latest = RUNS / "latest"
        latest.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "learning_curve.png", "config.yaml"):
            if (self.path / name).exists():
                shutil.copyfile(self.path / name, latest / name)

    def close(self) -> None:
        self._metrics.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _folder_of(config: RunConfig, now: datetime) -> Path:
    if config.experiment_dir != "auto":
        return Path(config.experiment_dir).expanduser()
    stem = now.strftime("%Y-%m-%d_%H-%M-%S")
    names = (stem if i == 0 else f"{stem}.{i}" for i in range(1000))
    return next(RUNS / name for name in names if not (RUNS / name).exists())


def _left_out(outcome: Outcome) -> dict[str, Any]:
    """An episode that did not train: failed, or in a group that was dropped."""
    if isinstance(outcome, EpisodeFailed):
        return {"episode_uuid": outcome.episode_uuid, "failures": outcome.failures}
    assert isinstance(outcome, EpisodeAccepted)
    return {"episode_uuid": outcome.episode_uuid, "reward": outcome.reward, "left_out": "group too small"}
