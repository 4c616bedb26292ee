"""A command in a terminal of its own, and what is on the screen."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyte


class Terminal:
    """A pseudoterminal of 100 columns and 40 rows, and the command that has it as its controlling one."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        self._screen = pyte.Screen(100, 40)
        self._stream = pyte.ByteStream(self._screen)
        self._fd, theirs = os.openpty()
        os.set_blocking(self._fd, False)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs,
            preexec_fn=lambda: os.login_tty(theirs),
        )  # fmt: skip
        os.close(theirs)

    def lines(self) -> list[str]:
        """What is on the screen now."""
        self._read()
        return [line.rstrip() for line in self._screen.display]

    @property
    def cursor_is_free(self) -> bool:
        """Whether the cursor is visible and at the beginning of an empty line."""
        cursor = self._screen.cursor
        return not cursor.hidden and cursor.x == 0 and not self._screen.display[cursor.y].strip()

    @property
    def cursor_is_shown(self) -> bool:
        return not self._screen.cursor.hidden

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, condition: Callable[[list[str]], object], *, seconds: float = 150) -> list[str]:
        """The screen, once `condition` holds for it; fails if the command ends first or takes too long."""
        deadline = time.monotonic() + seconds
        while not condition(lines := self.lines()):
            assert self.process.poll() is None, "\n".join(self.lines())
            assert time.monotonic() < deadline, "\n".join(lines)
            select.select([self._fd], [], [], 0.2)
        return lines

    def wait(self, *, seconds: float = 150) -> int:
        """The exit code. Reads meanwhile: a full terminal would hold the command up."""
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, "\n".join(self.lines())
            select.select([self._fd], [], [], 0.2)
            self._read()
        return code

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # Nothing more now; or, once the command has ended, ever.
                return
            if not data:
                return
            self._stream.feed(data)

    def close(self) -> None:
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            psutil.wait_procs(family, timeout=20)
        os.close(self._fd)


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[Terminal]:
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    opened = Terminal(command, folder, env | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"})
    try:
        yield opened
    finally:
        opened.close()
