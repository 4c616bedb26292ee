"""The end of a run: a table in the terminal and the learning curve as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table


def print_summary(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Before, after, and what it took."""
    table = Table(show_header=False, title=f"Run {folder.name}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in _rows(summary):
        table.add_row(label, value)
    console.print(table)
    console.print("\nAre the tokens that trained those that were sampled?", style="bold")
    for line in summary["alignment"]:
        console.print(f"  {line}", highlight=False, soft_wrap=True)


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if summary["eval_before"] is not None:
        rows += [
            ("held-out score before", f"{summary['eval_before']:.3f}"),
            ("held-out score after", f"{summary['eval_after']:.3f}"),
            ("evaluation episodes, each time", f"{summary['eval_episodes']:,}"),
        ]
    return [
        *rows,
        ("training episodes", f"{summary['train_episodes']:,}"),
        ("episodes per second", f"{summary['episodes_per_s']:.0f}"),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("training time", f"{summary['train_seconds']:.0f} s"),
        ("lost / failed / retried", f"{summary['episodes_lost']} / {summary['episodes_failed']} / "
                                    f"{summary['episodes_retried']}"),
        ("max |trainer - sampler logprob|", f"{summary['max_abs_dlogp']:.1e}"),
        ("sequences per episode", f"{summary['sequences_per_episode']:.2f}"),
    ]  # fmt: skip


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
