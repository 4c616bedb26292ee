"""A run with sharded weights that starts a replica of SGLang, the fake as its own process, and ends it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from command_line import ROOT, named, start_training

TESTS = ROOT / "tests"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_run_starts_sglang_proves_each_version_and_ends_it(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (TESTS / "launched", TESTS)))
    settings = {
        "engine.lora.rank": 8,
        "engine.devices": 2,
        "engine.sharding": "shard",
        "inference.backend": "sglang",
        "inference.launch.replicas": 1,
        "inference.launch.env.PYTHONPATH": path,
        "inference.launch.env.PYTHONWARNINGS": "ignore",
        "training.steps": 2,
        "training.groups_per_step": 4,
        "training.group_size": 4,
        "evaluation.episodes": 8,
    }
    command = start_training(tmp_path, **settings)
    command.until(lambda: bool(named(command.family(), "sglang.launch_server")), seconds=120)
    family = command.family()
    assert command.wait(seconds=180) == 0, command.text()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == [], [process.cmdline() for process in alive]
    proofs = [json.loads(line) for line in (tmp_path / "run" / "replicas.jsonl").read_text().splitlines()]
    verdicts = {proof["version"]: proof["verdict"] for proof in proofs if proof["version"] is not None}
    assert verdicts == {0: "unchanged", 1: "proved", 2: "proved"}
    assert {proof["verdict"] for proof in proofs if proof["version"] is None} == {"proved"}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes_lost"] == 0
    assert 0 < summary["max_abs_dlogp"] < 1e-4
