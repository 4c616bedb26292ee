"""A teacher at a vLLM server: what a run learns from it, and what happens when it dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_server import RunningVllm, running_vllm

from taught_model import taught_sums
from tinkerscript.config import RunConfig
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic.py"
STEPS = 6


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_sums(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def server(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningVllm]:
    folder = tmp_path_factory.mktemp("server")
    with running_vllm(folder, folder / "adapters", model=taught) as made:
        made.wait()
        yield made


def config(folder: Path, role: dict[str, Any], **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "experiment_dir": str(folder),
            "enable_tinkerscript_mode": False,
            "seed": 5,
            "task": {"name": f"{ARITHMETIC}@arithmetic", "eval_args": {"split": "test"}},
            "sampling": {"max_tokens": 8},
            "roles": {"teacher": {"kind": "frozen", **role}},
            "training": {
                "steps": STEPS,
                "groups_per_step": 64,
                "group_size": 1,
                "learning_rate": 5e-4,
                "loss_fn": "importance_sampling",
                "checkpoint_every": 1,
                "distillation": {"teacher": "teacher"},
            },
            "evaluation": {"episodes": 0},
            **more,
        }
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


async def test_a_student_learns_the_same_through_vllm_and_through_the_engine(
    server: RunningVllm, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    await run_training(config(tmp_path / "served", {"base_url": server.url}), QuietReporter())
    await run_training(config(tmp_path / "beside", {"model": str(taught)}), QuietReporter())
    served, beside = metrics(tmp_path / "served"), metrics(tmp_path / "beside")
    kl = [line["distillation/teacher_kl"] for line in served]
    print([round(value, 3) for value in kl])
    assert np.mean(kl[-2:]) < 0.7 * kl[0]
    assert kl[0] == pytest.approx(beside[0]["distillation/teacher_kl"], abs=1e-3)
    assert [x["train/sequences"] for x in served] == [64] * STEPS
