"""W&B, Trackio and TensorBoard by name: tinker_cookbook's loggers, and torch's writer behind the same class.

Invariant: a package that is not asked for is not needed, and one that is asked for and not there is refused
before the run begins.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.utils.ml_log import Logger, TrackioLogger, WandbLogger

from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError


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
