"""Show a run on a console: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
import webbrowser
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tinkerscript.dashboard import counted, wrapped
from tinkerscript.dashboard.progress import Phase, ProgressReporter, rate_text, role_rewards
from tinkerscript.dashboard.run_table import RunTable


@contextmanager
def shown_progress(console: Console) -> Generator[LineReporter | TableReporter]:
    if console.is_interactive and console.file.isatty():
        with TableReporter(console).opened() as reporter:
            yield reporter
    else:
        yield LineReporter(console)


def open_in_browser(url: str, note: Callable[[str], object]) -> None:
    """Open `url` without blocking. Calls `note` if no browser is found."""

    def work() -> None:
        if not webbrowser.open(url):
            note(f"no browser was found here; open {url}")

    threading.Thread(target=work, name="browser", daemon=True).start()


def print_wrapped(console: Console, text: str, style: str = "") -> None:
    shown = wrapped(text, console.width) if console.is_terminal else text
    console.print(shown, style=style, highlight=False, soft_wrap=True, markup=False)


def print_summary(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    table = Table(show_header=False, title=f"Run {folder.name}", title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in _rows(summary):
        table.add_row(label, value)
    roles: Mapping[str, Mapping[str, Any]] = summary.get("roles", {})
    for name, role in roles.items():
        table.add_section()
        for label, value in _role_rows(role):
            table.add_row(f"{name}: {label}", value)
    console.print(table)
    reports = {"": summary["alignment"], **{f" of {name}": role["alignment"] for name, role in roles.items()}}
    for whose, lines in reports.items():
        console.print(f"\nToken alignment{whose}", style="bold")
        for line in lines:
            print_wrapped(console, f"  {line}")


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if summary["eval_before"] is not None:
        rows += [
            ("held-out score before", _score(summary, "eval_before")),
            ("held-out score after", _score(summary, "eval_after")),
            ("evaluation episodes, each time", f"{summary['eval_episodes']:,}"),
        ]
    return [
        *rows,
        ("training episodes", f"{summary['train_episodes']:,}"),
        ("episodes per second", rate_text(summary["episodes_per_s"])),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("training time", f"{summary['train_seconds']:.0f} s"),
        ("lost / failed / retried", f"{summary['episodes_lost']} / {summary['episodes_failed']} / "
                                    f"{summary['episodes_retried']}"),
        ("max |trainer - sampler logprob|", f"{summary['max_abs_dlogp']:.1e}"),
        ("sequences per episode", f"{summary['sequences_per_episode']:.2f}"),
    ]  # fmt: skip


def _score(summary: Mapping[str, Any], name: str) -> str:
    margin: float | None = summary.get(f"{name}_margin")
    return f"{summary[name]:.3f}" + ("" if margin is None else f" ± {margin:.3f}")


def _role_rows(role: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if role["eval_before"] is not None:
        rows.append(("held-out score before", f"{role['eval_before']:.3f}"))
    if role["eval_after"] is not None:
        rows.append(("held-out score after", f"{role['eval_after']:.3f}"))
    return [
        *rows,
        ("tokens trained", f"{role['tokens_trained']:,}"),
        ("max |trainer - sampler logprob|", f"{role['max_abs_dlogp']:.1e}"),
    ]


REPORT_WAIT_AFTER_S = 2.0

REPORT_PROGRESS_AFTER_S = 10.0

REPORT_AGAIN_AFTER_S = 60.0
"""Also delays the first wait, so the page's address comes first."""

SHOWN_METRICS: dict[str, Callable[[float], str]] = {
    "reward/mean": "reward {:.3f}".format,
    "train/nll": "nll {:.4f}".format,
    "policy_version": "policy {:.0f}".format,
    "episodes_per_s": lambda rate: f"{rate_text(rate)} episodes/s",
    "tokens_per_s": "{:.0f} tokens/s".format,
}


class LineReporter(ProgressReporter):
    def __init__(self, console: Console, *, report_after_s: float = REPORT_WAIT_AFTER_S) -> None:
        self._console = console
        self._say_after_s = report_after_s
        self._steps = 0
        self._has_begun = False

    def begin(self, steps: int, *, done: int = 0) -> None:
        self._steps = steps

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        after_s = self._say_after_s if self._has_begun else REPORT_AGAIN_AFTER_S
        with self._reported(lambda: f"waiting for {what}", after_s=after_s):
            yield

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        batch = _Batch()
        with self._reported(
            lambda: f"{label}: {batch.done}/{total or '?'} episodes", after_s=REPORT_PROGRESS_AFTER_S
        ):
            yield batch

    @contextmanager
    def _reported(self, text: Callable[[], str], *, after_s: float) -> Generator[None]:
        # A thread prints, because a wait may block the event loop.
        ended = threading.Event()

        def report() -> None:
            pause = after_s
            while not ended.wait(pause):
                self._print(text())
                pause = REPORT_AGAIN_AFTER_S

        thread = threading.Thread(target=report, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = [text(metrics[name]) for name, text in SHOWN_METRICS.items() if name in metrics]
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
    def __init__(self) -> None:
        self.done = 0

    def advance(self, episodes: int) -> None:
        self.done += episodes


def evaluation_line(label: str, score: float, episodes: int, failed: int) -> str:
    failures = f", {failed} failed" if failed else ""
    return f"evaluation {label}: {score:.3f}  ({counted(episodes, 'episode')}{failures})"


ASCII = str.maketrans("━─±→…▁▂▃▄▅▆▇█", "=-~>~..:-=+*#")


class TableReporter(ProgressReporter, Phase):
    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._table = RunTable(clock())
        self._lock = threading.Lock()
        self._live = Live(console=console, get_renderable=self._frame, refresh_per_second=2, transient=True)

    @contextmanager
    def opened(self) -> Generator[TableReporter]:
        self._live.start()
        self._console.show_cursor()  # A killed process may have hidden it.
        try:
            yield self
        finally:
            with suppress(OSError):  # The run outlives a closed terminal.
                self._live.stop()
        for line in self._table.last_frame(self._console.width):
            self._console.print(self._readable(line), highlight=False, no_wrap=True)

    def _frame(self) -> Group:
        columns, rows = self._console.size
        with self._lock:
            lines = self._table.frame(columns, rows, self._clock())
        return Group(*(self._readable(line) for line in lines))

    def _readable(self, line: Text) -> Text:
        if self._console.options.ascii_only:
            line.plain = line.plain.translate(ASCII)
        return line

    def begin(self, steps: int, *, done: int = 0) -> None:
        with self._lock:
            self._table.begin(steps, done)

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        wait = (what, self._clock())
        with self._lock:
            self._table.waits.append(wait)
        try:
            yield
        finally:
            with self._lock:
                self._table.waits.remove(wait)

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        with self._lock:
            self._table.batch, self._table.batch_began = (label, 0, total), self._clock()
        try:
            yield self
        finally:
            with self._lock:
                self._table.batch = None

    def advance(self, episodes: int) -> None:
        with self._lock:
            if self._table.batch is not None:
                label, done, total = self._table.batch
                self._table.batch = (label, done + episodes, total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._table.step(step, metrics, self._clock())

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        with self._lock:
            self._table.evaluation(label, score, failed)
        print_wrapped(self._console, evaluation_line(label, score, episodes, failed))

    def note(self, message: str) -> None:
        print_wrapped(self._console, message, "yellow")

    def page(self, url: str) -> None:
        with self._lock:
            self._table.page = url
