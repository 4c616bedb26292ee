"""Train the demo, or another config, with each recipe and seed, and print the area under each held-out curve.

    python bench/recipes.py [--recipes grpo dapo ...] [--seeds 1 2 3] [--set KEY=VALUE ...] [--runs FOLDER]
        [--config FILE] [--scorer NAME] [--at-once 8]

Each pair is a run of `tinkerscript train` in FOLDER/RECIPE-SEED, with ten steps and an evaluation after every
second one. A run that is there already is read, and one that was interrupted goes on. `none` is the config as
it is, without a recipe: the others are compared with it, seed by seed. `--at-once` runs share a GPU.

The area is the mean of the held-out score over the steps, with straight lines between evaluations. The
intervals are of 95%, by Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from curves import ROOT, Run, area, read, train
from tinkerscript.config import RECIPES

BASE = "none"
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""The 97.5% quantile of Student's t by the number of values."""

SETTINGS = [
    *("training.steps=10", "evaluation.episodes=400", "evaluation.every_steps=2"),
    *("evaluation.interim_episodes=400", "page_port=off", "recording=off"),
]


def settings_of(recipe: str, scorer: str) -> list[str]:
    """The recipe's own keys too, without the demo's clipping: the config's would win."""
    if recipe == BASE:
        return []
    keys = {"recipe": recipe, "clip_low": None, "clip_high": None, **RECIPES[recipe].keys}
    if recipe == "gdpo":
        keys["reward_weights"] = {scorer: 1.0}
    return [f"training.{key}={json.dumps(value)}" for key, value in keys.items()]


def interval(values: Sequence[float]) -> str:
    """Their mean, and its 95% interval to each side."""
    mean = statistics.fmean(values)
    if len(values) not in STUDENT:
        return f"{mean:.3f}"
    margin = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {margin:.3f}"


def row(recipe: str, runs: Sequence[Run], base: Sequence[Run]) -> str:
    areas, below = ([area([point[:2] for point in run.scores]) for run in each] for each in (runs, base))
    above = [found - other for found, other in zip(areas, below, strict=True)]
    first, last = (interval([run.scores[end][1] for run in runs]) for end in (0, -1))
    difference = "" if recipe == BASE else interval(above)
    return f"| {recipe} | {interval(areas)} | {difference} | {first} | {last} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "arithmetic.yaml")
    parser.add_argument("--runs", type=Path, default=Path("recipes"))
    parser.add_argument("--scorer", default="exact", help="of the task, for gdpo")
    parser.add_argument("--at-once", type=int, default=1, help="runs")
    options = parser.parse_args()
    recipes = (BASE, *options.recipes)

    def run(recipe: str, seed: int) -> Run:
        folder = options.runs.absolute() / f"{recipe}-{seed}"
        settings = [*SETTINGS, *options.settings, *settings_of(recipe, options.scorer)]
        train(options.config, folder, seed, settings, quiet=options.at_once > 1)
        return read(folder, seed)

    with ThreadPoolExecutor(options.at_once) as pool:
        asked = [(recipe, pool.submit(run, recipe, seed)) for seed in options.seeds for recipe in recipes]
        found: dict[str, list[Run]] = {recipe: [] for recipe in recipes}
        for recipe, each in asked:
            found[recipe].append(each.result())
    print("| recipe | area | above `none` | before | after |")
    print("|---|---|---|---|---|")
    for recipe, runs in found.items():
        print(row(recipe, runs, found[BASE]))


if __name__ == "__main__":
    main()
