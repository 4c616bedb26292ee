"""Credit per call against the episode's reward alone, at equal episodes.

    python bench/credit.py [--steps N] [--seeds N ...] [--arms episode turn state]

Trains the tiny model on `examples/six_sums.py`, where the second of six turns earns the reward, from the same
weights with as many episodes each: all turns on the episode's reward (`credit.level: episode`), and each on
what it and later ones earned (`turn`, `state`). What counts is the area under the curve of held-out reward
over training episodes, divided by those episodes: the mean reward on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml

from distillation import area, train

EXAMPLE = Path(__file__).parents[1] / "examples" / "six_sums.yaml"

EVERY = 3
"""Steps between evaluations."""

HELD_OUT = 300


def curve(folder: Path, level: str, seed: int, steps: int) -> list[tuple[int, float]]:
    """(training episodes, held-out reward) of one run, from its start to its end."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    config["task"]["name"] = str(EXAMPLE.parent / config["task"]["name"])
    config["seed"] = seed
    config["training"] |= {"steps": steps, "checkpoint_every": 0, "credit": {"level": level}}
    config["evaluation"] = {"episodes": HELD_OUT, "every_steps": EVERY, "interim_episodes": HELD_OUT}
    episodes = config["training"]["groups_per_step"] * config["training"]["group_size"]
    run_dir = train(folder, f"{level} {seed}", config)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"] * episodes, line["eval/score"]) for line in lines if "eval/score" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="*", default=["episode", "turn"])
    options = parser.parse_args()
    areas: dict[str, list[float]] = {arm: [] for arm in options.arms}
    with tempfile.TemporaryDirectory() as name:
        for seed in options.seeds:
            for arm, found in areas.items():
                points = curve(Path(name), arm, seed, options.steps)
                found.append(area(points))
                said = {"credit": arm, "seed": seed, "area": round(found[-1], 3), "curve": points}
                print(json.dumps(said), flush=True)
    for arm, found in areas.items():
        spread = f"{statistics.mean(found):.3f} ({min(found):.3f}-{max(found):.3f})"
        print(json.dumps({"credit": arm, "seeds": len(found), "area": spread}))


if __name__ == "__main__":
    main()
