"""`RunFolder`: the files of one run.

config.yaml  metrics.jsonl  ledger.sqlite  alignment.json  summary.json  learning_curve.png
rollouts/step_0001.jsonl.gz  checkpoints/step_0005/  checkpoints/final/  checkpoints/roles/NAME/final/
logs/  inspect/  sft_data.json  run_id

Invariants: one trainer at a time holds a lock that dies with its process. Checkpoints that a resumed run
repeats are moved to `undone_N`.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tinker_cookbook.utils.ml_log import JsonLogger, MultiplexLogger
from tokenizers import Tokenizer

from tinkerscript.config import RunConfig, dump_config
from tinkerscript.dashboard.learning_curve import NLL_CURVE, REWARD_CURVE, draw_learning_curve
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import ConfigError
from tinkerscript.files import write_atomically, write_json
from tinkerscript.lifecycle import try_lock
from tinkerscript.remote_folder import ROLES, Uploads, is_url
from tinkerscript.rollouts.advantages import AdvantageRule, RolloutGroup
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.train.identity import (
    check_unused,
    check_whole,
    damage_of,
    identify,
    link_as_latest,
    write_manifest,
)
from tinkerscript.train.step_metrics import TrainerMetrics, metric_loggers
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome

ALIGNMENT_FILE = "alignment.json"
FINAL_CHECKPOINT = "final"


class RunFolder:
    def __init__(self, config: RunConfig, model: Path, *, now: datetime, path: Path | None = None) -> None:
        """`path`: folder of a run to resume, or of a server to join; None: `experiment_dir` decides.

        Raises ConfigError for a new run in a used folder, and if another trainer uses it.
        """
        self._tokenizer: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.path = path or config.new_folder(now)
        if not config.enable_tinkerscript_mode:
            # Inspect changes the working directory to load a task.
            self.path = self.path.absolute()
        if path is None:
            check_unused(self.path)
        else:
            check_whole(self.path)
        self._url = config.experiment_dir if is_url(config.experiment_dir) else ""
        self._keep = config.training.keep_checkpoints
        self._uploads: Uploads | None = None
        # Rollouts may be private.
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("rollouts", "checkpoints", "logs"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self.run_id = identify(self.path)
        lock = try_lock(self.path / "trainer.lock")
        if lock is None:
            raise ConfigError(f"another trainer is using {self.path}")
        self._lock = lock
        self.exported = TrainerMetrics()
        try:
            loggers = [JsonLogger(self.path), self.exported, *metric_loggers(config, self.path)]
            self._metrics = MultiplexLogger(loggers)
        except ConfigError:
            self._lock.close()
            raise
        path = self.path / "config.yaml"
        self._config_before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_atomically(path, dump_config(config))
        self._curve = NLL_CURVE if config.method == "sft" else REWARD_CURVE
        self._next_drawing = 0.0
        link_as_latest(self.path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoints_of(self, role: str) -> Path:
        return self.checkpoints / ROLES / role

    def checkpoints_named(self, name: str) -> list[Path]:
        return [*sorted(self.checkpoints.glob(f"{ROLES}/*/{name}")), self.checkpoints / name]

    def checkpoint_name(self, step: int) -> str:
        return f"step_{step:04d}"

    def _lacks(self, name: str) -> str:
        return next(filter(None, map(damage_of, self.checkpoints_named(name))), "")

    def seal(self, name: str) -> None:
        """Mark checkpoints as complete, the run's own last. Blocks."""
        for folder in self.checkpoints_named(name):
            write_manifest(folder, self.run_id)

    def whole_checkpoints(self) -> list[int]:
        return [step for step, path in _made_in(self.checkpoints) if not self._lacks(path.name)]

    def set_aside_after(self, step: int, *, resumption: int) -> list[str]:
        aside, start = f"undone_{resumption}", f"step {step}" if step else "the beginning"
        said: list[str] = []
        for folder in self._policies:
            for later, path in _made_in(folder):
                if later <= step:
                    continue
                if folder == self.checkpoints:
                    damage = self._lacks(path.name)
                    why = f"not complete ({damage})" if damage else "not in the ledger"
                    said.append(
                        f"the checkpoint {path} is {why}: the run continues from {start}, and this "
                        f"checkpoint was moved to {folder / aside}"
                    )
                (folder / aside).mkdir(exist_ok=True)
                path.rename(folder / aside / path.name)
        return said

    @asynccontextmanager
    async def copied(self, note: Callable[[str], None]) -> AsyncGenerator[None]:
        """If `experiment_dir` is a URL, copy finished files there. `note` gets failures."""
        if not self._url:
            yield
            return
        async with Uploads(self.path, self._url, note) as self._uploads:
            yield

    async def finish_copies(self, progress: ProgressReporter) -> None:
        """Raises UploadError."""
        if self._uploads is not None:
            with progress.waiting(f"the copies at {self._url}"):
                await self._uploads.finish()

    def checkpointed(self, *, needed: Collection[int] = ()) -> None:
        self.keep_checkpoints(self._keep, needed=needed)
        if self._uploads is not None:
            self._uploads.copy()

    def keep_checkpoints(self, number: int, *, needed: Collection[int] = ()) -> None:
        for folder in self._policies:
            for step, old in _made_in(folder)[:-number]:
                if step not in needed:
                    shutil.rmtree(old)

    @property
    def _policies(self) -> list[Path]:
        return [self.checkpoints, *self.checkpoints.glob(f"{ROLES}/*")]

    def forget_metrics_after(self, step: int) -> None:
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line, beyond=step + 1) <= step]
        write_atomically(path, "".join(f"{line}\n" for line in kept))

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Leaves out NaN, which JSON cannot hold."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._metrics.log_metrics(finite, step)

    def write_rollouts(
        self,
        name: str,
        groups: Sequence[RolloutGroup],
        outcomes: Mapping[str, Outcome],
        rule: AdvantageRule,
        left_out: Mapping[str, str],
    ) -> None:
        """Write one JSON line per episode, also failed ones. `left_out`: uuid -> why it does not train."""
        lines = [
            self._readable(group, episode, advantage)
            | ({"left_out": left_out[episode.episode_uuid]} if episode.episode_uuid in left_out else {})
            for group in groups
            for episode, advantage in zip(group.episodes, group.advantages(rule).tolist(), strict=True)
        ]
        seen = {line["episode_uuid"] for line in lines}
        lines += [
            _left_out(outcome, left_out.get(uuid, "group too small"))
            for uuid, outcome in outcomes.items()
            if uuid not in seen
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        packed = gzip.compress(text.encode(), compresslevel=1, mtime=0)  # Higher levels are much slower.
        write_atomically(self.path / "rollouts" / f"{name}.jsonl.gz", packed)

    def _readable(self, group: RolloutGroup, episode: EpisodeRollouts, advantage: float) -> dict[str, Any]:
        return {
            "group_id": group.group_id,
            "episode_uuid": episode.episode_uuid,
            "reward": episode.reward,
            "advantage": advantage,
            "policy_versions": sorted({v for call in episode.calls for v in call.policy_versions}),
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
        write_json(self.path / name, data)

    def draw_curve(self, *, at_once: bool = False) -> None:
        """Blocks, for at most a twentieth of the time unless `at_once`."""
        began = time.monotonic()
        if at_once or began >= self._next_drawing:
            draw_learning_curve(self.path / "metrics.jsonl", self.path / "learning_curve.png", self._curve)
            ended = time.monotonic()
            self._next_drawing = ended + 20 * (ended - began)

    def keep_config(self) -> None:
        """Call this once the run can go on with its config. Until then, `close` puts the one before back."""
        self._config_before = ""

    def close(self) -> None:
        if self._config_before:
            write_atomically(self.path / "config.yaml", self._config_before)
        self._metrics.close()
        self._lock.close()


def steps_finished(run_dir: Path) -> int | None:
    path = run_dir / "summary.json"
    return int(json.loads(path.read_text())["steps"]) if path.exists() else None


def _made_in(folder: Path) -> list[tuple[int, Path]]:
    found = {path: re.fullmatch(r"step_(\d+)", path.name) for path in folder.iterdir()}
    return sorted((int(match[1]), path) for path, match in found.items() if match)


def _step_of(line: str, *, beyond: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return beyond


def _left_out(outcome: Outcome, why: str) -> dict[str, Any]:
    if isinstance(outcome, EpisodeFailed):
        return {"episode_uuid": outcome.episode_uuid, "failures": outcome.failures}
    assert isinstance(outcome, EpisodeAccepted)
    return {"episode_uuid": outcome.episode_uuid, "reward": outcome.reward, "left_out": why}
