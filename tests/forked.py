"""Child processes that start with a trainer's imports done, as forks of a process that has made them.

A trainer imports for six seconds of processor time, and the tests start dozens of them. They hash strings
alike, as interpreters of their own do not: what must not depend on that is compared with a fresh one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PRELOADED = [
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tinkerscript.cli",
    "tinkerscript.commands.train",
    "tinkerscript.engine.lora",
    "tinkerscript.engine.memory",
    "tinkerscript.server.process",
    "tinkerscript.train.backends.embedded_engine",
    "tinkerscript.train.inspect_logs",
    "tinkerscript.train.run",
    "tinkerscript.workers.inspect_task",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOADED)


class Forked:
    """A process that calls a function; it is used as a `subprocess.Popen` is."""

    def __init__(
        self,
        target: Callable[..., object],
        arguments: Sequence[object] = (),
        *,
        cwd: Path,
        output: Path,
        argv: Sequence[str] = ("",),
    ) -> None:
        """Call `target` in `cwd`; what it prints is appended to the file `output`."""
        run = (target, tuple(arguments), cwd, output, dict(os.environ), list(argv))
        self._process = _CONTEXT.Process(target=_run, args=run)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    target: Callable[..., object],
    arguments: tuple[Any, ...],
    cwd: Path,
    output: Path,
    environ: dict[str, str],
    argv: list[str],
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = argv
    try:
        target(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its children without them.
