"""On-policy distillation against GRPO alone, at equal episodes.

    python bench/distillation.py [--steps N] [--seeds N] [--teacher CHECKPOINT [--teacher-url URL]]

The demo's training makes a teacher from the tiny model (`examples/arithmetic.yaml`; its episodes are stated,
and `--teacher` uses a checkpoint that is there, which a vLLM server at `--teacher-url` may serve). Then fresh
students train on the same sums from the same weights with the demo's learning rate, as many episodes each: on
the task's reward alone (GRPO, as the demo does, and with the other students' loss function), on the teacher's
scores alone, and on both. What counts is the area under the curve of held-out accuracy over training
episodes, divided by those episodes: the mean accuracy on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

DEMO = Path(__file__).parents[1] / "examples" / "arithmetic.yaml"

EPISODES = 128
"""Of a step."""

EVERY = 2
"""Steps between evaluations."""

HELD_OUT = 300

ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GRPO, importance_sampling": {"loss_fn": "importance_sampling"},
    "teacher": {
        "loss_fn": "importance_sampling",
        "group_size": 1,
        "distillation": {"teacher": "teacher"},
    },
    "teacher and reward": {
        "loss_fn": "importance_sampling",
        "distillation": {"teacher": "teacher", "reward_coef": 1.0},
    },
}
"""What each student trains with. If no rewards are compared, each episode of a step is of another sample."""


def train(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """The folder of a run of `config`, in one process."""
    run_dir = folder / name.replace(",", "").replace(" ", "-")
    config |= {"experiment_dir": str(run_dir), "enable_tinkerscript_mode": False, "recording": "off"}
    path = folder / f"{run_dir.name}.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tinkerscript", "train", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run_dir


def demo() -> dict[str, Any]:
    config = yaml.safe_load(DEMO.read_text())
    config["task"]["name"] = str(DEMO.parent / config["task"]["name"])
    return config


def teacher(folder: Path) -> dict[str, Any]:
    """The demo's training: its last checkpoint, its episodes, and what it scores."""
    run_dir = train(folder, "teacher", demo() | {"evaluation": {"episodes": 1000}})
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "checkpoint": str(run_dir / "checkpoints" / "final"),
        "episodes": summary["train_episodes"],
        "held_out": summary["eval_after"],
    }


def student(folder: Path, arm: str, seed: int, steps: int, role: dict[str, Any]) -> list[tuple[int, float]]:
    """(training episodes, held-out accuracy) of one run, from its start to its end."""
    config = demo()
    taught = {"roles": {"teacher": {"kind": "frozen", **role}}} if "distillation" in ARMS[arm] else {}
    config |= {"seed": seed, **taught}
    config["training"] |= {"steps": steps, "checkpoint_every": 0, **ARMS[arm]}
    config["training"]["groups_per_step"] = EPISODES // config["training"]["group_size"]
    config["evaluation"] = {"episodes": HELD_OUT, "every_steps": EVERY, "interim_episodes": HELD_OUT}
    run_dir = train(folder, f"{arm} {seed}", config)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"] * EPISODES, line["eval/score"]) for line in lines if "eval/score" in line]


def area(curve: Sequence[tuple[int, float]]) -> float:
    """By the trapezoidal rule, over the episodes: the mean accuracy on the way."""
    total = sum((after[0] - before[0]) * (after[1] + before[1]) / 2 for before, after in pairwise(curve))
    return total / (curve[-1][0] - curve[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher", default="")
    parser.add_argument("--teacher-url", default="")
    parser.add_argument("--students", nargs="*", default=list(ARMS), choices=list(ARMS))
    options = parser.parse_args()
    areas: dict[str, list[float]] = {arm: [] for arm in options.students}
    with tempfile.TemporaryDirectory() as name:
        made = {"checkpoint": options.teacher} if options.teacher else teacher(Path(name))
        print(json.dumps({"teacher": made}), flush=True)
        url = options.teacher_url
        role = {"base_url": url} if url else {"model": made["checkpoint"]}
        for seed in range(1, options.seeds + 1):
            for arm, found in areas.items():
                curve = student(Path(name), arm, seed, options.steps, role)
                found.append(area(curve))
                said = {"student": arm, "seed": seed, "area": round(found[-1], 3), "curve": curve}
                print(json.dumps(said), flush=True)
    for arm, found in areas.items():
        spread = f"{statistics.mean(found):.3f} ({min(found):.3f}-{max(found):.3f})"
        print(json.dumps({"student": arm, "episodes": options.steps * EPISODES, "area": spread}))


if __name__ == "__main__":
    main()
