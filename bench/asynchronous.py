"""Asynchronous against synchronous training with slow workers.

    python bench/asynchronous.py [--wait SECONDS] [--steps N] [--rounds N]

Trains the tiny model as a user does, with a rollout that mostly waits (`bench/slow_rollout.py`); only
`training.asynchronous` differs. With it, the episodes of the next step run while the current one trains, at a
policy lag of one step. Without `--wait` the rollout waits as long as a step trains, measured first: there,
overlapping the two gains most (a factor of 2 at best). Episodes a second of the clock, from the end of the
first step to that of the last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def config_of(run_dir: Path, steps: int, *, asynchronous: bool) -> dict[str, Any]:
    return {
        "experiment_dir": str(run_dir),
        "interchange_server": {"interchange_server_port": 0},
        "task": {
            "name": f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic",
            "train_args": {"split": "train"},
            "eval_args": {"split": "test"},
        },
        "training": {
            "steps": steps,
            "groups_per_step": 4,
            "group_size": 8,
            "learning_rate": 1e-5,
            "asynchronous": asynchronous,
            "max_policy_lag": 1,
            "checkpoint_every": 0,
        },
        "evaluation": {"episodes": 0},
        "workers": {"count": 1, "concurrency": 32, "script": str(ROOT / "bench" / "slow_rollout.py")},
    }


def run(wait_s: float, steps: int, *, asynchronous: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(config_of(run_dir, steps, asynchronous=asynchronous)))
        command = [sys.executable, "-m", "tinkerscript", "train", str(config)]
        environment = os.environ | {"SLOW_ROLLOUT_S": str(wait_s)}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = lines[1:]
    # A step's time: waiting for its episodes, then training; what they did before is another step's time.
    seconds = sum(line["time/rollout_s"] + line["time/train_s"] for line in counted)
    return {
        "episodes_per_s": sum(line["episodes/accepted"] for line in counted) / seconds,
        "train_s": statistics.median(line["time/train_s"] for line in counted),
        "waiting_s": statistics.median(line["time/rollout_s"] for line in counted),
        "failed": sum(line["episodes/failed"] for line in counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    wait = options.wait or run(0.5, 3, asynchronous=False)["train_s"]
    print(json.dumps({"rollout_waits_s": round(wait, 2)}), flush=True)
    pairs = [
        tuple(run(wait, options.steps, asynchronous=mode) for mode in (True, False))
        for _ in range(options.rounds)
    ]
    for name, index in (("asynchronous", 0), ("synchronous", 1)):
        medians = {key: round(statistics.median(p[index][key] for p in pairs), 2) for key in pairs[0][index]}
        print(json.dumps({"training": name, **medians}))
    ratios = [one["episodes_per_s"] / other["episodes_per_s"] for one, other in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    print(json.dumps({"asynchronous_over_synchronous": spread}))


if __name__ == "__main__":
    main()
