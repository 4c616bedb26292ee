"""The learning curve of a run, as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def draw_learning_curve(metrics_file: Path, target: Path) -> None:
    """Training reward of each step and the evaluations, as a PNG."""
    rewards, scores = _read_curve(metrics_file)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        if rewards:
            axes.plot(*zip(*rewards, strict=True), color="#4c78a8", linewidth=1.2, label="training reward")
        if scores:
            axes.plot(
                *zip(*scores, strict=True), "o-", color="#e45756", linewidth=1.5, label="held-out score"
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel("mean reward")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(target)


def _read_curve(metrics_file: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    lines = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    rewards = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    scores = [(line["step"], line["eval/score"]) for line in lines if "eval/score" in line]
    return rewards, scores
