"""A run over a base in 8 bits."""

from __future__ import annotations

import json
from pathlib import Path

from short_runs import curve, short_run
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training


async def test_the_tokens_that_train_are_those_that_were_sampled(tmp_path: Path) -> None:
    """With a KL reference, which is the same base without the adapter."""
    engine = {"quantization": "int8", "lora": {"rank": 8}}
    training = {"steps": 3, "groups_per_step": 4, "group_size": 4, "kl_penalty_coef": 0.05}
    training |= {"learning_rate": 1e-3}
    await run_training(short_run(tmp_path, engine=engine, training=training), QuietReporter())
    report = json.loads((tmp_path / "alignment.json").read_text())
    assert (report["errors"], report["findings"]) == ({}, [])
    assert 0 < report["max_abs_dlogp"] < 1e-4
    steps = [step for step in curve(tmp_path) if "train/grad_norm" in step]
    assert len(steps) == 3
    assert all(step["train/grad_norm"] > 0 for step in steps)
    first, *_, last = [step["train/kl_start"] for step in steps]
    assert abs(first) < 1e-5, "the reference has the same quantized base"
    assert abs(last) > 100 * abs(first)
