"""`Supervisor` restarts a run's processes when they die, and stops them at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from tinkerscript.errors import WorkerError
from tinkerscript.lifecycle import last_lines
from tinkerscript.processes.launcher import Child, Launcher, LocalLauncher

CHILD_GRACE_S = 4.0
"""Seconds before SIGKILL. An interrupted run exits hard only later."""

BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before consecutive restarts; the last one repeats."""

STABLE_AFTER_S = 60.0
"""A child that lived this long is restarted at once."""


class Supervisor:
    def __init__(
        self, *, max_restarts: int, note: Callable[[str], None], launcher: Launcher | None = None
    ) -> None:
        self._local = LocalLauncher()
        self.launcher = launcher or self._local
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
        await asyncio.shield(self._end())

    async def _end(self) -> None:
        self._stopping.set()
        await asyncio.gather(*(self._stop(child) for child in self._children))
        await asyncio.gather(*self._tasks)
        if self._failure is not None and self._failure.done():
            self._failure.exception()  # It was raised already, or is too late.

    @property
    def restarts(self) -> int:
        return sum(child.restarts for child in self._children)

    async def start(self, child: Child) -> None:
        self._children.append(child)
        await self._spawn(child)
        self._tasks.append(asyncio.create_task(self._keep(child), name=f"keep {child.name}"))

    def kill(self, child: Child) -> None:
        if child.process is not None and child.process.returncode is None:
            child.process.kill()

    async def failed(self) -> None:
        """Raises ChildFailedError when a child cannot run or dies too often."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def _spawn(self, child: Child) -> None:
        launcher = self._local if child.on_trainer_machine else self.launcher
        child.process = await launcher.start(child)

    async def _keep(self, child: Child) -> None:
        try:
            await self._keep_running(child)
        except (OSError, WorkerError) as error:
            self.fail(error)

    async def _keep_running(self, child: Child) -> None:
        limit = self._max_restarts if child.max_restarts is None else child.max_restarts
        quick_deaths = 0
        while True:
            assert child.process is not None
            began = time.monotonic()
            code = await child.process.wait()
            if self._stopping.is_set():
                return
            child.on_death(child.restarts, code)
            quick_deaths = 0 if time.monotonic() - began > STABLE_AFTER_S else quick_deaths + 1
            if code in child.fatal_codes or child.restarts >= limit:
                self.fail(ChildFailedError(child))
                return
            pause = BACKOFF_S[min(quick_deaths, len(BACKOFF_S)) - 1] if quick_deaths else 0.0
            end = child.process.describe_end()
            self._note(f"{child.name} died ({end}); starting it again in {pause:.1f} s")
            stopped = await self._stopped_within(pause)
            while not (stopped or child.may_restart()):
                stopped = await self._stopped_within(BACKOFF_S[0])
            if stopped:
                return
            child.restarts += 1
            await self._spawn(child)
            if self._stopping.is_set():  # We were asked to stop meanwhile.
                await self._stop(child)
                return

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def fail(self, error: Exception) -> None:
        """Make `failed` raise `error`, unless it has one."""
        assert self._failure is not None
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _stop(self, child: Child) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        process.ask_to_stop()
        try:
            try:
                await asyncio.wait_for(process.wait(), CHILD_GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        except WorkerError as error:
            self.fail(error)


class ChildFailedError(WorkerError):
    def __init__(self, child: Child) -> None:
        assert child.process is not None
        super().__init__(
            f"{child.name} ended ({child.process.describe_end()}) after {child.restarts} restarts; "
            f"the end of {child.log}:\n{last_lines(child.log)}"
        )


class CanFail(Protocol):
    async def failed(self) -> None: ...


WorkT = TypeVar("WorkT")


async def run_beside(others: CanFail, work: asyncio.Task[WorkT]) -> WorkT:
    """Await `work`, but raise when a dependency fails."""
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
