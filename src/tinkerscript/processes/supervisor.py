"""`Supervisor`: child processes that are restarted when they die and stopped when their run ends.

Invariant: no child outlives this process. A child's standard input is a pipe from here, which closes however
this process dies, and the child then ends by itself (`--exit-with-parent`). Children run in sessions of
their own: Ctrl-C reaches only this process, which stops them in order, and what a child has started ends with
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from tinkerscript.errors import WorkerError
from tinkerscript.lifecycle import describe_exit, last_lines

STOP_GRACE_S = 4.0
"""Seconds between the request to stop and SIGKILL, before an interrupted supervisor exits hard itself."""

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds of backoff before the first, second, ... restart in a row; the last one repeats."""

STABLE_AFTER_S = 60.0
"""A child that lived this long is restarted at once, with its backoff reset."""


@dataclass
class Child:
    """One supervised process; `argv` is called for each incarnation, numbered from 0."""

    name: str
    argv: Callable[[int], Sequence[str]]
    log: Path
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    """Its environment; None: this process's."""

    on_death: Callable[[int, int], None] = lambda incarnation, code: None
    """Called with the number of the incarnation that died, and its exit code."""

    fatal_codes: frozenset[int] = frozenset({2})
    """Exit codes after which a restart does not help: bad configuration, a port in use."""

    restarts: int = 0
    process: Process | None = field(default=None, repr=False)


class Supervisor:
    """Owns child processes. An async context manager: leaving it stops every child."""

    def __init__(self, *, max_restarts: int, note: Callable[[str], None]) -> None:
        self._max_restarts = max_restarts
        self._note = note
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[None] | None = None
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Supervisor:
        self._failure = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop every child, now rather than at the end of the context."""
        await asyncio.shield(self._end())

    async def _end(self) -> None:
        self._stopping.set()
        await asyncio.gather(*(self._stop(child) for child in self._children))
        await asyncio.gather(*self._tasks)
        if self._failure is not None and self._failure.done():
            self._failure.exception()  # Raised already, or too late to matter.

    @property
    def restarts(self) -> int:
        """Number of restarts, of all children."""
        return sum(child.restarts for child in self._children)

    async def start(self, child: Child) -> None:
        """Start `child` and keep it running."""
        self._children.append(child)
        await self._spawn(child)
        self._tasks.append(asyncio.create_task(self._keep(child), name=f"keep {child.name}"))

    def kill(self, child: Child) -> None:
        """Kill a child that hangs, which starts it again."""
        if child.process is not None and child.process.returncode is None:
            _kill_session(child.process)

    async def failed(self) -> None:
        """Never returns; raises ChildFailedError when a child dies too often or cannot run."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def _spawn(self, child: Child) -> None:
        with child.log.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.argv(child.restarts),
                stdin=PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=child.environ,
            )

    async def _keep(self, child: Child) -> None:
        quick_deaths = 0
        while True:
            assert child.process is not None
            began = time.monotonic()
            code = await child.process.wait()
            _kill_session(child.process)
            if self._stopping.is_set():
                return
            child.on_death(child.restarts, code)
            quick_deaths = 0 if time.monotonic() - began > STABLE_AFTER_S else quick_deaths + 1
            if code in child.fatal_codes or child.restarts >= self._max_restarts:
                self._fail(child, code)
                return
            pause = BACKOFF_S[min(quick_deaths, len(BACKOFF_S)) - 1] if quick_deaths else 0.0
            self._note(f"{child.name} died ({describe_exit(code)}); starting it again in {pause:.1f} s")
            if await self._stopped_within(pause):
                return
            child.restarts += 1
            await self._spawn(child)
            if self._stopping.is_set():  # The stop came while the child was starting.
                await self._stop(child)
                return

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _fail(self, child: Child, code: int) -> None:
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_exception(ChildFailedError(child, code))

    async def _stop(self, child: Child) -> None:
        """Close the child's standard input, which asks it to stop; kill it if it does not."""
        process = child.process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            _kill_session(process)
            await process.wait()


def _kill_session(process: Process) -> None:
    """Kill a child and whatever it started, also when it has died itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class ChildFailedError(WorkerError):
    """A child process cannot run, or died more often than allowed."""

    def __init__(self, child: Child, code: int) -> None:
        super().__init__(
            f"{child.name} ended ({describe_exit(code)}) after {child.restarts} restarts; "
            f"the end of {child.log}:\n{last_lines(child.log)}"
        )


class CanFail(Protocol):
    """Something that work depends on."""

    async def failed(self) -> None:
        """Never returns; raises when it fails."""
        ...


WorkT = TypeVar("WorkT")


async def run_beside(others: CanFail, work: asyncio.Task[WorkT]) -> WorkT:
    """Await `work`, but fail as soon as what it depends on fails."""
    watch = asyncio.create_task(others.failed(), name="watch children")
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await watch
        return await work
    finally:
        if not work.done():
            work.cancel()
        watch.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
