"""Episodes per second through the whole path, and where the processor time goes.

    python bench/episodes.py [--config examples/arithmetic.yaml] [--steps N] [--rounds N]

Runs the demo's training as a user does (trainer, interchange server, workers), and as the reference the
same steps in one process (`enable_tinkerscript_mode: false`), in turn. Evaluation is off. Processor time is
the operating system's own account of each process, from the first step to the last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil

DEMO = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"


def role_of(command: list[str]) -> str | None:
    text = " ".join(command)
    for role, mark in (("server", "tinkerscript server"), ("workers", "tinkerscript worker")):
        if mark in text:
            return role
    return None


def cpu_seconds(trainer: psutil.Process) -> dict[str, float]:
    """User and system seconds so far, by role."""
    total: dict[str, float] = defaultdict(float)
    for process in [trainer, *trainer.children()]:
        try:
            role = "trainer" if process == trainer else role_of(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        if role:
            total[role] += times.user + times.system
    return dict(total)


def wait_for_lines(path: Path, lines: int, process: subprocess.Popen[bytes]) -> None:
    """Until the metrics have so many lines, or the run is over."""
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.02)
    raise SystemExit(f"the run ended early with exit code {process.returncode}")


def run(config: Path, steps: int, *, networked: bool) -> dict[str, Any]:
    """Train for `steps` steps; the first one is warm-up and not counted."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = {
            "experiment_dir": run_dir,
            "enable_tinkerscript_mode": str(networked).lower(),
            "training.steps": steps,
            "evaluation.episodes": 0,
            "evaluation.every_steps": 0,
            "interchange_server.interchange_server_port": 0,
        }
        command = [sys.executable, "-m", "tinkerscript", "train", str(config)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        trainer = psutil.Process(process.pid)
        metrics = run_dir / "metrics.jsonl"
        wait_for_lines(metrics, 1, process)
        before, began = cpu_seconds(trainer), time.perf_counter()
        wait_for_lines(metrics, steps, process)
        after, seconds = cpu_seconds(trainer), time.perf_counter() - began
        lines = [json.loads(line) for line in metrics.read_text().splitlines()][1:]
        if process.wait():
            raise SystemExit(f"the run failed with exit code {process.returncode}")
    episodes = sum(line["episodes/accepted"] + line["episodes/failed"] for line in lines)
    return {
        "episodes_per_s": episodes / seconds,
        "rollout_share": sum(line["time/rollout_s"] for line in lines) / seconds,
        "cpu_ms_per_episode": {role: 1000 * (after[role] - before.get(role, 0)) / episodes for role in after},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=DEMO)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pairs = [
        (
            run(options.config, options.steps, networked=True),
            run(options.config, options.steps, networked=False),
        )
        for _ in range(options.rounds)
    ]
    for index, name in enumerate(("networked", "in process")):
        results = [pair[index] for pair in pairs]
        roles = sorted({role for result in results for role in result["cpu_ms_per_episode"]})
        print(
            json.dumps(
                {
                    "path": name,
                    "episodes_per_s": round(statistics.median(r["episodes_per_s"] for r in results), 1),
                    "rollout_share_of_time": round(statistics.median(r["rollout_share"] for r in results), 2),
                    "cpu_ms_per_episode": {
                        role: round(
                            statistics.median(r["cpu_ms_per_episode"].get(role, 0) for r in results), 2
                        )
                        for role in roles
                    },
                }
            )
        )
    ratio = statistics.median(a["episodes_per_s"] / b["episodes_per_s"] for a, b in pairs)
    print(json.dumps({"networked_over_in_process": round(ratio, 2)}))


if __name__ == "__main__":
    main()
