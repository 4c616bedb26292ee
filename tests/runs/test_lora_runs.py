"""Runs that train a LoRA adapter: resumed, started from, and refused where they would be something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from short_runs import curve, short_run
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training


def config(folder: Path, *, steps: int, lora: dict[str, Any] | None = None, **engine: Any) -> RunConfig:
    training: dict[str, Any] = {"steps": steps, "groups_per_step": 4, "group_size": 4, "learning_rate": 1e-3}
    training |= {"lr_schedule": "constant", "kl_penalty_coef": 0.05, "checkpoint_every": 1}
    return short_run(folder, engine={"lora": lora or {}, **engine}, training=training)


async def test_a_run_of_an_adapter_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lora = {"rank": 4, "targets": ["attn", "mlp"]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    await run_training(config(whole, steps=3, lora=lora), QuietReporter())
    await run_training(config(parts, steps=2, lora=lora), QuietReporter())
    await run_training(config(parts, steps=3, lora=lora), QuietReporter(), path=parts)
    for one, other in zip(curve(whole), curve(parts), strict=True):
        for name in ("reward/mean", "train/grad_norm", "train/kl_start"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    report = json.loads((parts / "alignment.json").read_text())
    assert report["max_abs_dlogp"] <= 1e-4
    first, second = (load_file(run / "checkpoints/final/adapter_model.safetensors") for run in (whole, parts))
    assert {name: value.shape for name, value in first.items()} == {
        name: value.shape for name, value in second.items()
    }
    for name, value in first.items():
        assert second[name] == pytest.approx(value, abs=1e-5), name
    assert not any("lm_head" in name for name in first)

    adapter = str(parts / "checkpoints" / "final")
    started = config(tmp_path / "started", steps=1, lora=lora, checkpoint=adapter)
    await run_training(started, QuietReporter())
    with pytest.raises(ConfigError, match="holds a LoRA adapter; name its base"):
        await run_training(config(tmp_path / "a", steps=1, model=adapter), QuietReporter())
    with pytest.raises(EngineError, match="tinkerscript merge"):
        await run_training(config(tmp_path / "b", steps=1, checkpoint=adapter), QuietReporter())
