"""What the episodes of a step say of themselves, as metrics: scores, limits hit, kinds of errors. Pure.

W&B, Trackio and TensorBoard by name: tinker_cookbook's loggers, and torch's writer behind the same class.

Invariant: a package that is not asked for is not needed, and one that is asked for and not there is refused
before the run begins.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.utils.ml_log import Logger, TrackioLogger, WandbLogger

from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError
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


class TensorBoardLogger(Logger):
    """Scalars as TensorBoard's event files in `folder`; the config as text."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._open: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._folder = folder
        self._config = config
        self._writer: Any = None

    def log_hparams(self, config: Any) -> None:
        """Comes with the first metrics."""
        self._config = config

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """One point for each number that is finite. What a resumed run makes again takes the old's place."""
        if self._writer is None:
            self._writer = self._open(log_dir=str(self._folder), purge_step=step)
            lines = (f"| {section} | {values} |" for section, values in self._config.items())
            table = "\n".join(["| section | values |", "|---|---|", *lines])
            self._writer.add_text("config", table, global_step=step)
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def metric_loggers(config: RunConfig, folder: Path) -> list[Logger]:
    """The loggers that `metrics.loggers` names, ready to write.

    Raises ConfigError for a package that is not installed, and for one that refuses to start.
    """
    values, project = config.model_dump(mode="json"), config.metrics.project
    makers: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoardLogger(folder / "tensorboard", values),
        "wandb": lambda: WandbLogger(project, values, folder, wandb_name=folder.name),
        "trackio": lambda: TrackioLogger(project, values, trackio_name=folder.name),
    }
    return [_made(name, makers[name]) for name in config.metrics.loggers]


def _made(name: str, make: Callable[[], Logger]) -> Logger:
    try:
        importlib.import_module(name)
        return make()
    except ImportError as error:
        raise ConfigError(
            f"metrics.loggers: {name} cannot be imported ({error}): pip install 'tinkerscript[{name}]'"
        ) from error
    except TinkerCookbookError as error:
        raise ConfigError(f"metrics.loggers: {name}: {error}") from error
