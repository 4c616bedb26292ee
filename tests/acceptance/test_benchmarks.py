"""Each benchmark of `make bench` runs to its end, in small, from any folder; what it finds is not looked at.

tests/page runs the one that needs a browser.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import ROOT
from tinkerscript.model_folder import TINY_MODEL

SMALL = {
    "agents": "--agents 20 --processes 1 2 --turns 2 --think 0.5 --context 6000 --long 1 --big 1",
    "bridge": "--episodes 20 --long 40",
    "credit": "--steps 1 --seeds 1 --arms turn",
    "curriculum": "--steps 1 --seeds 1 --arms pass_rate",
    "distillation": f"--steps 2 --seeds 1 --teacher {TINY_MODEL}",
    "engine": "--models tiny --parts sampling training memory --rounds 1",
    "episodes": "--steps 2 --rounds 1",
    "failover": "--rounds 1 --episodes 100",
    "gateway": "--rounds 1 --calls 200",
    "interchange": "--rounds 1 --requests 300 --registered 1000",
    "memory": "--parts training",
    "merge": "--tokens 5000 --rounds 1",
    "stream": "--lags 1 --steps 4 --margin 1 --train 2",
    "transcripts": "--episodes 4",
    "vllm": "--rounds 1 --connections 4 --per-connection 1",
}


@pytest.mark.long
@pytest.mark.xdist_group("benchmarks")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "bench" / f"{name}.py", *SMALL[name].split()]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.strip()
