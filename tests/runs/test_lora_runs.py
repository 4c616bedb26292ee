"""Runs that train a LoRA adapter: resumed, started from, and refused where they would be something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from plain_sums import SUMS
from short_runs import curve, short_run
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

ADAPTER: dict[str, Any] = {"lora": {"rank": 4, "targets": ["attn", "mlp"]}, "quantization": "int8"}


def config(folder: Path, *, steps: int = 1, **engine: Any) -> RunConfig:
    training: dict[str, Any] = {"steps": steps, "groups_per_step": 3, "group_size": 4, "learning_rate": 1e-3}
    training |= {"lr_schedule": "constant", "kl_penalty_coef": 0.05, "checkpoint_every": 1}
    return short_run(folder, task=SUMS, engine=engine, training=training)


async def test_a_run_of_an_adapter_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a base in 8 bits, which is the KL reference too."""
    monkeypatch.chdir(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    await run_training(config(whole, steps=3, **ADAPTER), QuietReporter())
    await run_training(config(parts, steps=2, **ADAPTER), QuietReporter())
    await run_training(config(parts, steps=3, **ADAPTER), QuietReporter(), path=parts)
    for one, other in zip(curve(whole), curve(parts), strict=True):
        for name in ("reward/mean", "train/grad_norm", "train/kl_start"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    first, *_, last = [abs(line["train/kl_start"]) for line in curve(parts)]
    assert first < 1e-5
    assert last > 100 * first
    report = json.loads((parts / "alignment.json").read_text())
    assert report["max_abs_dlogp"] <= 1e-4
    assert (report["errors"], report["findings"]) == ({}, [])
    one, other = (load_file(run / "checkpoints/final/adapter_model.safetensors") for run in (whole, parts))
    assert {name: value.shape for name, value in one.items()} == {
        name: value.shape for name, value in other.items()
    }
    for name, value in one.items():
        assert other[name] == pytest.approx(value, abs=1e-5), name
    assert not any("lm_head" in name for name in one)

    adapter = str(parts / "checkpoints" / "final")
    await run_training(config(tmp_path / "started", **ADAPTER, checkpoint=adapter), QuietReporter())
    with pytest.raises(ConfigError, match="holds a LoRA adapter; name its base"):
        await run_training(config(tmp_path / "a", model=adapter), QuietReporter())
    with pytest.raises(EngineError, match="tinkerscript merge"):
        await run_training(config(tmp_path / "b", checkpoint=adapter), QuietReporter())
    with pytest.raises(EngineError, match="cannot load a causal language model"):
        await run_training(config(tmp_path / "c", checkpoint=str(tmp_path / "nowhere")), QuietReporter())
