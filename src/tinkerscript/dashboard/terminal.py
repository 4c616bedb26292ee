"""The terminal's view: one progress bar for the run, a line for each step when there is no terminal.

The end of a run in the terminal: a table, and whether what trained is what was sampled.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tinkerscript.dashboard.watcher import Phase, ProgressReporter

RATE_WINDOW_S = 10.0
"""Episodes per second are over this many seconds."""


LINE_EVERY_STEPS = 5
"""Without a terminal, a line is printed for every so many steps."""


class TerminalReporter(ProgressReporter):
    """Use as a context manager around the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps = 0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[details]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar: TaskID = self._progress.add_task("starting", total=1, details="")
        self._recent: deque[tuple[float, int]] = deque()
        self._learned = ""

    def __enter__(self) -> TerminalReporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, steps: int) -> None:
        self._steps = steps
        self._progress.update(self._bar, total=steps or 1)

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        self._label, self._total, self._done = label, total, 0
        self._refresh()
        yield self

    def advance(self, episodes: int) -> None:
        self._done += episodes
        self._recent.append((time.monotonic(), episodes))
        self._refresh()

    def _rate(self) -> float:
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()
        if not self._recent:
            return 0.0
        return sum(n for _, n in self._recent) / max(now - self._recent[0][0], 0.5)

    def _refresh(self) -> None:
        details = f"{self._learned}  {self._rate():.0f} episodes/s  ({self._done}/{self._total})"
        self._progress.update(self._bar, description=self._label, details=details)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._learned = _learned(metrics)
        self._progress.update(self._bar, completed=step, description="training", details=self._learned)
        if not self._console.is_terminal and (step % LINE_EVERY_STEPS == 0 or step == self._steps):
            self._console.print(f"step {step}/{self._steps}  {self._learned}  {_speed(metrics)}")

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        failures = f", {failed} failed" if failed else ""
        self._console.print(f"evaluation {label}: [bold]{score:.3f}[/bold]  ({episodes} episodes{failures})")

    def note(self, message: str) -> None:
        self._console.print(f"[yellow]{message}[/yellow]")


def _learned(metrics: Mapping[str, float]) -> str:
    """What a step says of the model."""
    if "reward/mean" not in metrics:
        return f"nll {metrics['train/nll']:.4f}"
    return f"reward {metrics['reward/mean']:.3f}  policy {metrics['policy_version']:.0f}"


def _speed(metrics: Mapping[str, float]) -> str:
    if "tokens_per_s" in metrics:
        return f"{metrics['tokens_per_s']:.0f} tokens/s"
    return f"{metrics['episodes_per_s']:.0f} episodes/s"


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
