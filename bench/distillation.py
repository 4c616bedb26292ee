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
import tempfile
from pathlib import Path
from typing import Any

from curves import compare, evaluated, example, train_here

DEMO = "arithmetic.yaml"

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


def teacher(folder: Path) -> dict[str, Any]:
    """The demo's training: its last checkpoint, its episodes, and what it scores."""
    run_dir = train_here(folder, "teacher", example(DEMO) | {"evaluation": {"episodes": 1000}})
    summary = json.loads((run_dir / "summary.json").read_text())
    return {
        "checkpoint": str(run_dir / "checkpoints" / "final"),
        "episodes": summary["train_episodes"],
        "held_out": summary["eval_after"],
    }


def student(folder: Path, arm: str, seed: int, steps: int, role: dict[str, Any]) -> list[tuple[int, float]]:
    config = example(DEMO)
    taught = {"roles": {"teacher": {"kind": "frozen", **role}}} if "distillation" in ARMS[arm] else {}
    config |= {"seed": seed, **taught}
    config["training"] |= {"steps": steps, "checkpoint_every": 0, **ARMS[arm]}
    config["training"]["groups_per_step"] = EPISODES // config["training"]["group_size"]
    config["evaluation"] = {"episodes": HELD_OUT, "every_steps": EVERY, "interim_episodes": HELD_OUT}
    return evaluated(train_here(folder, f"{arm} {seed}", config), config)


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
    with tempfile.TemporaryDirectory() as name:
        made = {"checkpoint": options.teacher} if options.teacher else teacher(Path(name))
        print(json.dumps({"teacher": made}), flush=True)
        url = options.teacher_url
        role = {"base_url": url} if url else {"model": made["checkpoint"]}
        seeds = range(1, options.seeds + 1)
        compare(
            "student",
            options.students,
            seeds,
            lambda arm, seed: student(Path(name), arm, seed, options.steps, role),
        )


if __name__ == "__main__":
    main()
