"""A curriculum over pass rates against every sample once in each pass, at equal episodes.

    python bench/curriculum.py [--steps N] [--groups N] [--samples N] [--seeds N ...] [--learning-rate RATE]

Trains the tiny model on `MixedSums`, where 40% of the samples are never right, 40% always are, and the rest
are sums, from the same weights with as many episodes each: without a curriculum, and with
`training.curriculum.by: pass_rate`. Other sums are held out. What counts is the area under the curve of
held-out accuracy over training episodes, divided by those episodes, above that of the start.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curves import compare, evaluated, train_here
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample

KINDS = ("sum", "never", "never", "always", "always")
HELD_OUT = 300
EVALUATIONS = 15


class MixedSums(Task):
    """`size` samples to train on, a fifth of them sums; the held-out ones are all sums."""

    def __init__(self, *, size: int = 100) -> None:
        self._size = size

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        pairs = [(a, b) for a in range(100) for b in range(a, 100)]
        random.Random(0).shuffle(pairs)
        chosen = pairs[-HELD_OUT:] if held_out else pairs[: self._size]
        return [
            {
                "id": f"{a}+{b}",
                "input": f"What is {a}+{b}?",
                "target": str(a + b),
                "kind": KINDS[0 if held_out else place % len(KINDS)],
            }
            for place, (a, b) in enumerate(chosen)
        ]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> float:
        reply = await model.ask([{"role": "user", "content": sample["input"]}], max_tokens=8)
        right = float(reply.strip() == sample["target"])
        return {"never": 0.0, "always": 1.0}.get(str(sample["kind"]), right)


def curve(folder: Path, by: str, seed: int, options: argparse.Namespace) -> list[tuple[int, float]]:
    training = {
        "steps": options.steps,
        "groups_per_step": options.groups,
        "group_size": 8,
        "learning_rate": options.learning_rate,
        "grad_clip_norm": 0.3,
        "checkpoint_every": 0,
        "curriculum": {"by": by},
    }
    every = max(1, options.steps // EVALUATIONS)
    config: dict[str, Any] = {
        "seed": seed,
        "engine": {"model": "tiny"},
        "task": {"name": f"{Path(__file__).absolute()}:MixedSums", "train_args": {"size": options.samples}},
        "training": training,
        "evaluation": {"episodes": HELD_OUT, "every_steps": every, "interim_episodes": HELD_OUT},
    }
    return evaluated(train_here(folder, f"{by} {seed}", config), config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--groups", type=int, default=2, help="a step")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--arms", nargs="*", default=["none", "pass_rate"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare(
            "curriculum",
            options.arms,
            options.seeds,
            lambda arm, seed: curve(folder, arm, seed, options),
            above_start=True,
        )


if __name__ == "__main__":
    main()
