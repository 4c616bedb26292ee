"""`LineReporter`: a run as lines, for logs and programs that read them: one for each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rich.console import Console

from tinkerscript.dashboard.progress import Phase, ProgressReporter, role_rewards

SAY_AFTER_S = 2.0
"""A wait is named after this many seconds."""

SAY_PROGRESS_AFTER_S = 10.0
"""And how far a batch has come."""

SAY_AGAIN_AFTER_S = 60.0
"""Then both again. Also the first wait of all: the address of the page is to be the first line."""

SHOWN = {
    "reward/mean": "reward {:.3f}",
    "train/nll": "nll {:.4f}",
    "policy_version": "policy {:.0f}",
    "episodes_per_s": "{:.0f} episodes/s",
    "tokens_per_s": "{:.0f} tokens/s",
}
"""Metrics of a step that are shown, if the step has them."""


class LineReporter(ProgressReporter):
    """Prints to a console that is not a terminal."""

    def __init__(self, console: Console, *, say_after_s: float = SAY_AFTER_S) -> None:
        """`say_after_s`: seconds after which a wait is named."""
        self._console = console
        self._say_after_s = say_after_s
        self._steps = 0
        self._has_begun = False

    def begin(self, steps: int, *, done: int = 0) -> None:
        self._steps = steps

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        after_s = self._say_after_s if self._has_begun else SAY_AGAIN_AFTER_S
        with self._said(lambda: f"waiting for {what}", after_s=after_s):
            yield

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        batch = _Batch()
        with self._said(
            lambda: f"{label}: {batch.done}/{total or '?'} episodes", after_s=SAY_PROGRESS_AFTER_S
        ):
            yield batch

    @contextmanager
    def _said(self, text: Callable[[], str], *, after_s: float) -> Generator[None]:
        """Print `text()` while the block takes long.

        In a thread: what is waited for may block the event loop.
        """
        ended = threading.Event()

        def say() -> None:
            pause = after_s
            while not ended.wait(pause):
                self._print(text())
                pause = SAY_AGAIN_AFTER_S

        thread = threading.Thread(target=say, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = [text.format(metrics[name]) for name, text in SHOWN.items() if name in metrics]
        roles = [f"{role} {reward:.3f}" for role, reward in role_rewards(metrics).items()]
        self._print("  ".join([f"step {step}/{self._steps}", *shown, *roles]))

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        self._print(evaluation_line(label, score, episodes, failed))

    def note(self, message: str) -> None:
        self._has_begun = True
        self._print(message)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class _Batch(Phase):
    """Counts the episodes of a batch."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, episodes: int) -> None:
        self.done += episodes


def evaluation_line(label: str, score: float, episodes: int, failed: int) -> str:
    failures = f", {failed} failed" if failed else ""
    return f"evaluation {label}: {score:.3f}  ({episodes} episodes{failures})"
