"""A run in the terminal: a progress bar (or lines, without a terminal), and a summary table at its end."""

from __future__ import annotations

import threading
import time
import webbrowser
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tinkerscript.dashboard.progress import Phase, ProgressReporter

RATE_WINDOW_S = 10.0
"""Window for the episodes per second."""

SAY_AFTER_S = 2.0
"""Without a terminal, a wait is named after this many seconds."""

SAY_PROGRESS_AFTER_S = 10.0
"""And how far a batch has come."""

SAY_AGAIN_AFTER_S = 60.0
"""Then both again."""

LINE_EVERY_STEPS = 5
"""Without a terminal, one line per this many steps."""

SHOWN = {
    "reward/mean": "reward {:.3f}",
    "train/nll": "nll {:.4f}",
    "policy_version": "policy {:.0f}",
    "episodes_per_s": "{:.0f} episodes/s",
    "tokens_per_s": "{:.0f} tokens/s",
}
"""Metrics of a step that are shown, if the step has them."""


class TerminalReporter(ProgressReporter):
    """Use as a context manager around the run."""

    def __init__(self, console: Console, *, say_after_s: float = SAY_AFTER_S) -> None:
        """`say_after_s`: seconds after which a wait is named, without a terminal."""
        self._console = console
        self._say_after_s = say_after_s
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
        self._label = "starting"
        self._bar: TaskID = self._progress.add_task(self._label, total=1, details="")
        self._recent: deque[tuple[float, int]] = deque()
        self._last_step = ""

    def __enter__(self) -> TerminalReporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, steps: int) -> None:
        self._steps = steps
        self._progress.update(self._bar, total=steps or 1)

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        self._progress.update(self._bar, description=f"waiting for {what}")
        try:
            with self._said(lambda: f"waiting for {what}", after_s=self._say_after_s):
                yield
        finally:
            self._progress.update(self._bar, description=self._label)

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        self._label, self._total, self._done = label, total, 0
        self._refresh()

        def text() -> str:
            return f"{label}: {self._done}/{self._total or '?'} episodes"

        with self._said(text, after_s=SAY_PROGRESS_AFTER_S):
            yield self

    @contextmanager
    def _said(self, text: Callable[[], str], *, after_s: float) -> Generator[None]:
        """Without a terminal, whose bar shows it, print `text()` while the block takes long.

        In a thread: what is waited for may block the event loop.
        """
        ended = threading.Event()

        def say() -> None:
            pause = after_s
            while not ended.wait(pause):
                self._console.print(text(), highlight=False, soft_wrap=True)
                pause = SAY_AGAIN_AFTER_S

        if self._console.is_terminal:
            yield
            return
        thread = threading.Thread(target=say, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

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
        details = f"{self._last_step}  {self._rate():.0f} episodes/s  ({self._done}/{self._total})"
        self._progress.update(self._bar, description=self._label, details=details)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = {name: text.format(metrics[name]) for name, text in SHOWN.items() if name in metrics}
        self._last_step = "  ".join(text for name, text in shown.items() if not name.endswith("_per_s"))
        self._label = "training"
        self._progress.update(self._bar, completed=step, description=self._label, details=self._last_step)
        if not self._console.is_terminal and (step % LINE_EVERY_STEPS == 0 or step == self._steps):
            self._console.print(f"step {step}/{self._steps}  {'  '.join(shown.values())}")

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        failures = f", {failed} failed" if failed else ""
        self._console.print(f"evaluation {label}: [bold]{score:.3f}[/bold]  ({episodes} episodes{failures})")

    def note(self, message: str) -> None:
        self._console.print(message, style="yellow", markup=False, soft_wrap=True)


def open_in_browser(url: str, console: Console) -> None:
    """Open `url` in the user's browser, in a thread: finding one takes time."""

    def work() -> None:
        if not webbrowser.open(url):
            console.print(f"no browser was found here; open {url}", highlight=False, soft_wrap=True)

    threading.Thread(target=work, name="browser", daemon=True).start()


def print_summary(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """The table of a finished run's summary.json, and its alignment report."""
    table = Table(show_header=False, title=f"Run {folder.name}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in _rows(summary):
        table.add_row(label, value)
    console.print(table)
    console.print("\nToken alignment", style="bold")
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
