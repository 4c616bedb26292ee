"""Train one config with several seeds, and write what docs/results.md shows of it.

    python bench/curves.py NAME CONFIG [--seeds 1 2 3] [--set KEY=VALUE ...] [--against KEY=VALUE ...]
        [--runs FOLDER] [--out FOLDER]

Each seed is a run of `tinkerscript train` in FOLDER/NAME-SEED. A run that is there already goes on, unless it
has ended. Prints a table of the seeds in Markdown, and writes OUT/results-NAME.png: the held-out score of
each seed with its 95% interval, and the reward of each training step behind it.

With `--against`, each seed runs once more with these settings too, in turn. Each way then has a table, the
seconds that training took, and a color in the picture.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

ROOT = Path(__file__).parents[1]
COLORS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2")
LAST_FROM_END = 5
"""Steps whose mean reward the table shows."""


@dataclass(frozen=True)
class Run:
    seed: int
    summary: dict[str, Any]
    rewards: list[tuple[int, float]]
    """Step -> mean reward of its training episodes."""

    scores: list[tuple[int, float, float]]
    """Step, held-out score, and the 95% interval to each side of it."""

    sampled: int
    """Tokens that the policy sampled in all, evaluations included."""

    minutes: float
    """From the first process' start to the last evaluation."""

    def row(self) -> str:
        (_, before, around), (step, after, around_after) = self.scores[0], self.scores[-1]
        last = [reward for _, reward in self.rewards[-LAST_FROM_END:]]
        return (
            f"| {self.seed} | {before:.3f} ± {around:.3f} | {after:.3f} ± {around_after:.3f} | {step} | "
            f"{sum(last) / len(last):.3f} | {self.sampled:,} | {self.minutes:.1f} | "
            f"{self.summary['max_abs_dlogp']:.0e} | {self.summary['episodes_lost']} |"
        )


def train(config: Path, folder: Path, seed: int, settings: list[str], *, quiet: bool = False) -> None:
    if (folder / "summary.json").exists():
        return
    command = [sys.executable, "-m", "tinkerscript", "train"]
    if folder.exists():
        command += ["--resume", str(folder)]
    else:
        command.append(str(config))
        settings = [f"experiment_dir={folder}", f"seed={seed}", *settings]
    command += [word for setting in settings for word in ("--set", setting)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if quiet else None)


def example(name: str) -> dict[str, Any]:
    """The config of an example, for a file in another folder."""
    path = ROOT / "examples" / name
    config = yaml.safe_load(path.read_text())
    config["task"]["name"] = str(path.parent / config["task"]["name"])
    return config


def train_here(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """The folder of a run of `config`, in one process."""
    path = folder / f"{name.replace(',', '').replace(' ', '-')}.yaml"
    path.write_text(yaml.safe_dump({**config, "enable_tinkerscript_mode": False, "recording": "off"}))
    train(path, path.with_suffix(""), config.get("seed", 1), [], quiet=True)
    return path.with_suffix("")


def evaluated(run: Path, config: dict[str, Any]) -> list[tuple[int, float]]:
    """(training episodes, held-out score) of a run, from its start to its end."""
    episodes = config["training"]["groups_per_step"] * config["training"]["group_size"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"] * episodes, line["eval/score"]) for line in lines if "eval/score" in line]


def area(points: Sequence[tuple[float, float]]) -> float:
    """The mean score on the way, with straight lines between the points."""
    places, scores = zip(*points, strict=True)
    return float(np.trapezoid(scores, places)) / (places[-1] - places[0])


def compare(
    what: str,
    arms: Sequence[str],
    seeds: Sequence[int],
    curve: Callable[[str, int], list[tuple[int, float]]],
    *,
    above_start: bool = False,
) -> None:
    """Print the curve of each arm and seed, in turn, and the areas under those of each arm. `above_start`:
    less the score that each begins with."""
    name = "gain" if above_start else "area"
    areas: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in seeds:
        for arm, found in areas.items():
            points = curve(arm, seed)
            found.append(area(points) - above_start * points[0][1])
            print(
                json.dumps({what: arm, "seed": seed, name: round(found[-1], 3), "curve": points}), flush=True
            )
    for arm, found in areas.items():
        spread = f"{statistics.mean(found):.3f} ({min(found):.3f}-{max(found):.3f})"
        print(json.dumps({what: arm, "seeds": len(found), name: spread}))


def read(folder: Path, seed: int) -> Run:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with closing(sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        scores = ledger.execute(
            "SELECT step, score, margin FROM evaluations WHERE undone = 0 ORDER BY step, time"
        ).fetchall()
        ((sampled, seconds),) = ledger.execute(
            "SELECT (SELECT sum(sampled_tokens) FROM calls), "
            "(SELECT max(time) FROM evaluations) - (SELECT min(time) FROM resumptions)"
        ).fetchall()
    return Run(
        seed=seed,
        summary=json.loads((folder / "summary.json").read_text()),
        rewards=[(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line],
        scores=scores,
        sampled=sampled,
        minutes=seconds / 60,
    )


def draw(runs: list[tuple[str, Run]], target: Path) -> None:
    """`runs`: each with what the legend calls it. Runs of one name have one color."""
    colors = dict(zip(dict.fromkeys(name for name, _ in runs), COLORS, strict=False))
    first = dict(reversed(runs))
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        for name, run in runs:
            color, label = colors[name], f"{name}, held out" if run is first[name] else None
            steps, scores, margins = zip(*run.scores, strict=True)
            axes.plot(*zip(*run.rewards, strict=True), color=color, linewidth=0.8, alpha=0.4)
            axes.errorbar(steps, scores, margins, fmt="o-", color=color, capsize=3, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel("mean reward (thin: training episodes)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="best")
        figure.savefig(target, format="png")


def print_table(runs: list[Run]) -> None:
    print("| seed | before | after | steps | reward at the end | tokens sampled | minutes | gap | lost |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run in runs:
        print(run.row())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--against", action="append", default=[])
    parser.add_argument("--runs", type=Path, default=Path("curves"))
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    ways = {options.name: options.settings}
    if options.against:
        ways[f"{options.name}-against"] = [*options.settings, *options.against]
    found: dict[str, list[Run]] = {name: [] for name in ways}
    for seed in options.seeds:
        for name, settings in ways.items():
            folder = options.runs.absolute() / f"{name}-{seed}"
            train(options.config, folder, seed, settings)
            found[name].append(read(folder, seed))
    named = {" ".join(ways[name]) or "as configured": runs for name, runs in found.items()}
    for way, runs in named.items():
        if options.against:
            seconds = ", ".join(f"{run.summary['train_seconds']:.0f}" for run in runs)
            print(f"{way}: training took {seconds} s")
        print_table(runs)
    drawn = [
        (way if options.against else f"seed {run.seed}", run) for way, runs in named.items() for run in runs
    ]
    draw(drawn, options.out / f"results-{options.name}.png")


if __name__ == "__main__":
    main()
