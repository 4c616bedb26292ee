"""Credit per call against the episode's reward alone, at equal episodes.

    python bench/credit.py [--steps N] [--seeds N ...] [--arms episode turn state]

Trains the tiny model on `examples/six_sums.py`, where the second of six turns earns the reward, from the same
weights with as many episodes each: all turns on the episode's reward (`credit.level: episode`), and each on
what it and later ones earned (`turn`, `state`). What counts is the area under the curve of held-out reward
over training episodes, divided by those episodes: the mean reward on the way.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from curves import compare, evaluated, example, train_here

EVERY = 3
"""Steps between evaluations."""

HELD_OUT = 300


def curve(folder: Path, level: str, seed: int, steps: int) -> list[tuple[int, float]]:
    config = example("six_sums.yaml") | {"seed": seed}
    config["training"] |= {"steps": steps, "checkpoint_every": 0, "credit": {"level": level}}
    config["evaluation"] = {"episodes": HELD_OUT, "every_steps": EVERY, "interim_episodes": HELD_OUT}
    return evaluated(train_here(folder, f"{level} {seed}", config), config)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="*", default=["episode", "turn"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare(
            "credit", options.arms, options.seeds, lambda arm, seed: curve(folder, arm, seed, options.steps)
        )


if __name__ == "__main__":
    main()
