"""An environment made with `vf-init` trains the tiny model, through the whole system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_packages import ADDITION, scaffold

CONFIG = """
experiment_dir: run
seed: 1
interchange_server: {interchange_server_port: 0}
task:
  name: verifiers:addition-v1
  train_args: {taskset: {num_tasks: 2000}}
  eval_args: {taskset: {num_tasks: 200, held_out: true}}
engine: {model: tiny}
sampling: {temperature: 1.0, max_tokens: 16}
training:
  steps: 10
  groups_per_step: 8
  group_size: 8
  minibatches: 4
  learning_rate: 5.0e-4
  lr_schedule: linear
  grad_clip_norm: 0.3
evaluation: {episodes: 200}
workers: {count: 1, concurrency: 32}
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_environment_of_verifiers_trains_the_tiny_model(tmp_path: Path) -> None:
    """640 episodes lift the score on held-out sums by at least 0.2; by about 0.45 when this was written."""
    scaffold("addition-v1", tmp_path, ADDITION)
    (tmp_path / "run.yaml").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "addition_v1")}
    command = [sys.executable, "-m", "tinkerscript", "train", "run.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    before, after = json.loads(metrics[0])["eval/before"], json.loads(metrics[-1])["eval/after"]
    print(f"held-out score {before} before, {after} after")
    assert after >= before + 0.2
    report = json.loads((tmp_path / "run" / "alignment.json").read_text())
    assert (report["errors"], report["findings"]) == ({}, [])
