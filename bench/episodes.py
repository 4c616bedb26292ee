"""Episodes per second through the whole path, and where the processor time goes.

    python bench/episodes.py [--config examples/arithmetic.yaml] [--steps N] [--rounds N] [--evaluate]

Runs the demo's training as a user does (trainer, interchange server, workers), and as the reference the
same steps in one process (`enable_tinkerscript_mode: false`), in turn. Evaluation is off. Processor time is
the operating system's own account of each process, from the first step to the last.

With `--evaluate` it compares an evaluation after every step (`evaluation.every_steps: 1`) with none instead.
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


def steps_in(metrics: Path) -> list[dict[str, Any]]:
    """The lines of training steps, without those of evaluations."""
    whole = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
    return [line for line in map(json.loads, whole) if "time/train_s" in line]


def wait_for_steps(path: Path, steps: int, process: subprocess.Popen[bytes]) -> None:
    """Until the metrics have so many steps, or the run is over."""
    while process.poll() is None:
        if len(steps_in(path)) >= steps:
            return
        time.sleep(0.02)
    raise SystemExit(f"the run ended early with exit code {process.returncode}")


def run(config: Path, steps: int, *, networked: bool = True, every_steps: int = 0) -> dict[str, Any]:
    """Train for `steps` steps; the first one is warm-up and not counted. `every_steps`: between evaluations;
    the run ends with its last step then."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        settings = {
            "experiment_dir": run_dir,
            "enable_tinkerscript_mode": str(networked).lower(),
            "training.steps": steps,
            "evaluation.episodes": 0,
            "evaluation.every_steps": every_steps,
            "interchange_server.interchange_server_port": 0,
        }
        command = [sys.executable, "-m", "tinkerscript", "train", str(config)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        trainer = psutil.Process(process.pid)
        metrics = run_dir / "metrics.jsonl"
        wait_for_steps(metrics, 1, process)
        before, began = cpu_seconds(trainer), time.perf_counter()
        wait_for_steps(metrics, steps, process)
        after, seconds = cpu_seconds(trainer), time.perf_counter() - began
        lines = steps_in(metrics)[1:]
        if every_steps:  # What is left of the evaluations is not measured.
            process.terminate()
            process.wait()
        elif process.wait():
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
    parser.add_argument("--evaluate", action="store_true")
    options = parser.parse_args()
    ways: dict[str, dict[str, Any]] = {"networked": {}, "in process": {"networked": False}}
    if options.evaluate:
        ways = {"evaluated": {"every_steps": 1}, "not evaluated": {}}
    pairs = [
        [run(options.config, options.steps, **way) for way in ways.values()] for _ in range(options.rounds)
    ]
    for index, name in enumerate(ways):
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
    first, second = ways
    print(json.dumps({f"{first}_over_{second}".replace(" ", "_"): round(ratio, 3)}))


if __name__ == "__main__":
    main()
