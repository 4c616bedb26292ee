"""`TableReporter`: a run in a terminal, as a small table, drawn in place, and what is noteworthy above it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tinkerscript.dashboard.line_reporter import evaluation_line
from tinkerscript.dashboard.progress import Phase, ProgressReporter
from tinkerscript.dashboard.run_table import RunTable, WorkersNow

ASCII = str.maketrans("━─±→…▁▂▃▄▅▆▇█", "=-~>~..:-=+*#")
"""For terminals of an encoding without the others."""


class TableReporter(ProgressReporter, Phase):
    """For a console that is a terminal. Use `opened` around the run."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._table = RunTable(clock())
        self._lock = threading.Lock()
        """Of the table: it is drawn by a thread of its own."""

        self._live = Live(console=console, get_renderable=self._frame, refresh_per_second=2, transient=True)

    @contextmanager
    def opened(self) -> Generator[TableReporter]:
        """Show the table while the context is open, and leave its last steps on the screen."""
        self._live.start()
        self._console.show_cursor()  # A killed process would leave the terminal without one.
        try:
            yield self
        finally:
            with suppress(OSError):  # The terminal may be gone; the run is not.
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

    # What the run tells

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
        self._console.print(evaluation_line(label, score, episodes, failed), highlight=False, soft_wrap=True)

    def note(self, message: str) -> None:
        self._console.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)

    # What else there is to show

    def page(self, url: str) -> None:
        """The run's page is at `url`."""
        with self._lock:
            self._table.page = url

    def workers(self, workers: WorkersNow | None) -> None:
        """Who works on the run now; None: not known."""
        with self._lock:
            self._table.workers = workers
