"""Metrics reach the loggers that the config names; one that is not installed is refused by name."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.train.run_folder import RunFolder


def config(folder: Path, *loggers: str) -> RunConfig:
    return RunConfig.model_validate({"experiment_dir": str(folder), "metrics": {"loggers": list(loggers)}})


def two_steps(tmp_path: Path, logger: str) -> Path:
    folder = RunFolder(config(tmp_path / "run", logger), TINY_MODEL, now=datetime.now())
    folder.log_metrics({"reward/mean": 0.25, "eval/score": float("nan")}, step=1)
    folder.log_metrics({"reward/mean": 0.5}, step=2)
    folder.close()
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward/mean"] for line in lines] == [0.25, 0.5]
    return folder.path


def test_metrics_are_valid_json_without_what_is_not_finite(tmp_path: Path) -> None:
    folder = RunFolder(config(tmp_path / "run"), TINY_MODEL, now=datetime.now())
    folder.log_metrics({"reward/mean": float("nan"), "eval/score": float("inf"), "eval/failed": 4.0}, step=1)
    folder.close()
    assert json.loads((folder.path / "metrics.jsonl").read_text()) == {"step": 1, "eval/failed": 4.0}


@pytest.mark.parametrize("logger", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_named_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str
) -> None:
    monkeypatch.setitem(sys.modules, logger, None)
    with pytest.raises(ConfigError, match=rf"{logger} cannot be .* pip install 'tinkerscript\[{logger}\]'"):
        RunFolder(config(tmp_path / "run", logger), TINY_MODEL, now=datetime.now())
    assert not (tmp_path / "run" / "config.yaml").exists()
    monkeypatch.undo()
    RunFolder(config(tmp_path / "run"), TINY_MODEL, now=datetime.now()).close()


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = two_steps(tmp_path, "tensorboard")
    resumed = RunFolder(config(path, "tensorboard"), TINY_MODEL, now=datetime.now(), path=path)
    resumed.log_metrics({"reward/mean": 0.75}, step=2)
    resumed.close()
    events: Any = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    assert "eval/score" not in events.Tags()["scalars"]
    assert any("config" in tag for tag in events.Tags()["tensors"])


@pytest.mark.parametrize(
    ("logger", "files"), [("wandb", "run/wandb/offline-run-*/*.wandb"), ("trackio", "trackio/*.db")]
)
def test_a_logger_has_a_run_of_the_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str, files: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(logger)
    two_steps(tmp_path, logger)
    assert list(tmp_path.glob(files))


def test_other_users_cannot_read_a_new_runs_folder(tmp_path: Path) -> None:
    RunFolder(config(tmp_path / "run"), TINY_MODEL, now=datetime.now()).close()
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0
    (tmp_path / "shared").mkdir(mode=0o750)
    RunFolder(config(tmp_path / "shared"), TINY_MODEL, now=datetime.now()).close()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o750, "one that was made for it keeps its mode"
