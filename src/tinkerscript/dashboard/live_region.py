"""`LiveRegion`: lines at the end of a terminal's output that are drawn again in place.

Invariants: what is printed while it is open ends up above it; however the process ends, the cursor is visible
and at the beginning of a free line; rows that a narrower terminal made of the lines are erased too.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

from rich.console import Console, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

DRAW_EVERY_S = 0.5
"""At most; a size that has changed is seen as soon."""

CLOCK_S = 1.0
"""Drawn again after this long if nothing happens: the lines show times."""

Frame = Callable[[int, int], list[Text]]
"""(columns, rows) -> lines without line breaks, each narrower and all together fewer than that."""


class LiveRegion(RenderHook):
    """For a console that is a terminal, and any thread."""

    def __init__(self, console: Console, frame: Frame) -> None:
        self._console = console
        self._frame = frame
        self._lock = threading.RLock()
        self._widths: list[int] = []
        """Of the lines on the screen, in columns."""

        self._size = console.size
        self._is_open = False
        self._changed = False
        self._closing = threading.Event()
        self.draws = 0
        """How often it was drawn."""

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def changed(self) -> None:
        """The lines are others now; they are drawn soon."""
        self._changed = True

    def print(self, *objects: Any, **options: Any) -> None:
        """`Console.print`, above the region."""
        with self._lock:
            self._console.print(*objects, **options)

    @contextmanager
    def opened(self) -> Generator[None]:
        """Draw the region while the context is open, and erase it at the end."""
        thread = threading.Thread(target=self._draw_until_closed, name="terminal", daemon=True)
        out, err = _Above(self, sys.stdout), _Above(self, sys.stderr)
        with redirect_stdout(cast("IO[str]", out)), redirect_stderr(cast("IO[str]", err)):
            self._console.push_render_hook(self)
            self._is_open = True
            thread.start()
            try:
                yield
            finally:
                self._closing.set()
                thread.join()
                out.flush()
                err.flush()
                self._is_open = False
                self._draw()
                self._console.pop_render_hook()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """rich's hook: erase the region, print what is to be printed, and draw the region below."""
        with self._lock:
            columns, rows = self._size = self._console.size
            above = sum(max(1, -(-width // columns)) for width in self._widths)
            lines = self._frame(columns, rows) if self._is_open else []
            self._widths = [line.cell_len for line in lines]
            self.draws += 1
            return [_erase(min(above, rows - 1)), *renderables, *lines]

    def _draw(self) -> None:
        self._changed = False
        self.print(Control())

    def _draw_until_closed(self) -> None:
        drawn = time.monotonic()
        try:
            self._draw()
            while not self._closing.wait(DRAW_EVERY_S):
                due = time.monotonic() - drawn >= CLOCK_S
                if self._changed or due or self._console.size != self._size:
                    drawn = time.monotonic()
                    self._draw()
        except OSError:  # The terminal is gone, and the run is not: it goes on without anybody to show it to.
            self._is_open = False


def _erase(rows: int) -> Control:
    """Erase the `rows` above the cursor, and move to the first of them."""
    up = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
    return Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up * rows)


class _Above(io.TextIOBase):
    """Stands in for a standard stream: whole lines go above the region."""

    def __init__(self, region: LiveRegion, stream: IO[str]) -> None:
        self._region = region
        self._stream = stream
        self._rest = ""

    @property
    def rich_proxied_file(self) -> IO[str]:
        """By this name rich's consoles find the stream itself."""
        return self._stream

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._show(line)
        return len(text)

    def flush(self) -> None:
        """Lines are shown as they end; the rest of one when the region closes."""
        if self._region.is_closing and self._rest:
            self._show(self._rest)
            self._rest = ""

    def _show(self, line: str) -> None:
        self._region.print(Text.from_ansi(line), soft_wrap=True)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()
