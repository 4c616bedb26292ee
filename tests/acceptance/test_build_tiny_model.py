"""The build script in its short form: the folder loads, the loss falls, a seed fixes the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_line import ROOT
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.gateway.rendering import ChatRenderer

STEPS = 40


def build(out: Path) -> Path:
    script = ROOT / "scripts" / "build_tiny_model.py"
    command = [sys.executable, script, "--out", out, "--samples", "1", "--steps", str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.long
def test_the_build_loads_learns_and_repeats(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        folder, again = threads.map(build, [tmp_path / "one", tmp_path / "two"])
    with EmbeddedEngine(folder, checkpoint_dir=tmp_path) as engine:
        ids = ChatRenderer(folder).render([{"role": "user", "content": "What is 23+45?"}], [])
        assert len(ids) < engine.max_context
    first, second = (load_file(path / "model.safetensors") for path in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    record = json.loads((folder / "training.json").read_text())
    assert record["steps"] == STEPS
    assert record["loss_last"] < record["loss_first"] - 0.5
    assert record["parameters"] == sum(weights.numel() for weights in first.values())
