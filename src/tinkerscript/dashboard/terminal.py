"""The terminal's view: one progress bar for the run, a line for each step when there is no terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tinkerscript.dashboard.watcher import Phase, Watcher

RATE_WINDOW_S = 10.0
"""Episodes per second are over this many seconds."""

LINE_EVERY_STEPS = 5
"""Without a terminal, a line is printed for every so many steps."""


class TerminalWatcher(Watcher):
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

    def __enter__(self) -> TerminalWatcher:
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
