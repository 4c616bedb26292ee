"""Training while groups stream, at a lag of one step, against synchronous training, with slow workers.

    python bench/stream.py [--wait SECONDS] [--steps N] [--rounds N]

Trains the tiny model as a user does, with a rollout that mostly waits (`bench/slow_rollout.py`); only
`training.max_policy_lag` differs: 1, where groups run while a step trains, and 0.
Without `--wait` the rollout waits as long as a step trains, measured first: there, overlapping the two gains
most (a factor of 2 at best). Episodes a second of the clock, from the end of the first step to that of the
last.
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


def config_of(run_dir: Path, steps: int, *, lag: int) -> dict[str, Any]:
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
            "max_policy_lag": lag,
            "checkpoint_every": 0,
        },
        "evaluation": {"episodes": 0},
        "workers": {"count": 1, "concurrency": 32, "script": str(ROOT / "bench" / "slow_rollout.py")},
    }


def run(wait_s: float, steps: int, *, lag: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(config_of(run_dir, steps, lag=lag)))
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
    wait = options.wait or run(0.5, 3, lag=0)["train_s"]
    print(json.dumps({"rollout_waits_s": round(wait, 2)}), flush=True)
    pairs = [tuple(run(wait, options.steps, lag=lag) for lag in (1, 0)) for _ in range(options.rounds)]
    for name, index in (("lag 1", 0), ("lag 0", 1)):
        medians = {key: round(statistics.median(p[index][key] for p in pairs), 2) for key in pairs[0][index]}
        print(json.dumps({"training": name, **medians}))
    ratios = [one["episodes_per_s"] / other["episodes_per_s"] for one, other in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    print(json.dumps({"lag_1_over_lag_0": spread}))


if __name__ == "__main__":
    main()
