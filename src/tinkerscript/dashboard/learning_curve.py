from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Curve:
    training: str
    training_label: str
    held_out: str
    held_out_label: str
    unit: str


REWARD_CURVE = Curve("reward/mean", "training reward", "eval/score", "held-out score", "mean reward")
NLL_CURVE = Curve("train/nll", "training nll", "held_out/nll", "held-out nll", "nats per token")


def draw_learning_curve(metrics_file: Path, target: Path, curve: Curve = REWARD_CURVE) -> None:
    # Matplotlib takes a second to import.
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    training, held_out = _points(metrics_file, curve.training), _points(metrics_file, curve.held_out)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        if training:
            axes.plot(
                *zip(*training, strict=True), color="#4c78a8", linewidth=1.2, label=curve.training_label
            )
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True), "o-", color="#e45756", linewidth=1.5, label=curve.held_out_label
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        axes.set_ylabel(curve.unit)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="best")
        draft = target.with_name(f".{target.name}")
        figure.savefig(draft, format="png")
        draft.replace(target)


def _points(metrics_file: Path, name: str) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    # An evaluation may end after later steps.
    return sorted((line["step"], line[name]) for line in lines if name in line)
