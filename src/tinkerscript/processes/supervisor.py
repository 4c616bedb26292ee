"""`Supervisor`: the child processes of a run, started again when they die and ended when it ends.

Children read a pipe as their standard input; when this process dies, however it dies, the pipe closes
and they end by themselves (`--exit-with-parent`). They have a session of their own, so that Ctrl-C
reaches this process alone and the end is orderly.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from tinkerscript.errors import WorkerError

STOP_GRACE_S = 8.0
"""Seconds between the request to stop and SIGKILL."""


BACK_OFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before the first, second, ... restart in a row; the last one repeats."""


STABLE_AFTER_S = 60.0
"""A child that lived this long starts again without a longer pause."""


@dataclass
class Child:
    """One supervised process; `argv` is called for each incarnation, numbered from 0."""

    name: str
    argv: Callable[[int], Sequence[str]]
    log: Path
    on_death: Callable[[int, int], None] = lambda incarnation, code: None
    """Called with the incarnation that died and its exit code."""

    fatal_codes: frozenset[int] = frozenset({2})
    """Exit codes that a restart cannot help: bad configuration, a port in use."""

    restarts: int = 0
    process: Process | None = field(default=None, repr=False)


class Supervisor:
    """Owns child processes. Use as an async context manager; leaving it ends every child."""

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
        await asyncio.shield(self._end())

    async def _end(self) -> None:
        self._stopping.set()
        await asyncio.gather(*(self._stop(child) for child in self._children))
        await asyncio.gather(*self._tasks)
        if self._failure is not None and self._failure.done():
            self._failure.exception()  # Told already, or too late to matter.

    @property
    def restarts(self) -> int:
        """Times that any child was started again."""
        return sum(child.restarts for child in self._children)

    async def start(self, child: Child) -> None:
        """Start `child` and keep it running."""
        self._children.append(child)
        await self._spawn(child)
        self._tasks.append(asyncio.create_task(self._keep(child), name=f"keep {child.name}"))

    async def failed(self) -> None:
        """Returns never; raises when a child died too often or cannot run."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def _spawn(self, child: Child) -> None:
        with child.log.open("ab") as log:
            child.process = await asyncio.create_subprocess_exec(
                *child.argv(child.restarts), stdin=PIPE, stdout=log, stderr=log, start_new_session=True
            )

    async def _keep(self, child: Child) -> None:
        quick_deaths = 0
        while True:
            assert child.process is not None
            began = time.monotonic()
            code = await child.process.wait()
            if self._stopping.is_set():
                return
            child.on_death(child.restarts, code)
            quick_deaths = 0 if time.monotonic() - began > STABLE_AFTER_S else quick_deaths + 1
            if code in child.fatal_codes or child.restarts >= self._max_restarts:
                self._fail(child, code)
                return
            pause = BACK_OFF_S[min(quick_deaths, len(BACK_OFF_S)) - 1] if quick_deaths else 0.0
            self._note(f"{child.name} died ({_describe(code)}); starting it again in {pause:.1f} s")
            if await self._stopped_within(pause):
                return
            child.restarts += 1
            await self._spawn(child)
            if self._stopping.is_set():  # It came while the child was being started.
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
        """Close the child's standard input, which asks it to end; kill it if it does not."""
        process = child.process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class ChildFailedError(WorkerError):
    """A child process cannot run, or died more often than allowed."""

    def __init__(self, child: Child, code: int) -> None:
        super().__init__(
            f"{child.name} ended ({_describe(code)}) after {child.restarts} restarts; "
            f"the end of {child.log}:\n{_tail(child.log)}"
        )


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _tail(log: Path, lines: int = 8) -> str:
    try:
        return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"    ({error})"


class CanFail(Protocol):
    """What work depends on."""

    async def failed(self) -> None:
        """Returns never; raises when it failed."""
        ...


WorkT = TypeVar("WorkT")


async def run_beside(others: CanFail, work: asyncio.Task[WorkT]) -> WorkT:
    """What `work` returns; fails as soon as what it depends on does."""
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
