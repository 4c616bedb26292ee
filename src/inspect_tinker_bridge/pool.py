"""The `TaskRunner` that the environments of a process share.

It is only open while it has a holder, so that other evals can run in between. Event loops of different
threads take turns.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from weakref import WeakKeyDictionary

from inspect_tinker_bridge.runner import RunnerOptions, TaskRunner
from inspect_tinker_bridge.tasks import InspectTaskInfo


class RunnerPool:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._opening = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: TaskRunner | None = None
        self._holders = 0

    async def acquire(self, task: InspectTaskInfo, options: RunnerOptions | None = None) -> TaskRunner:
        """Return an open runner with this task. Every `acquire` needs a `release`.

        Waits while another thread's event loop has a runner, or others hold a dead one. Raises RunnerError.
        """
        runner = await self._hold(task, options)
        try:
            await runner.add(task, options)
        except BaseException:
            await self.release()
            raise
        return runner

    async def _hold(self, task: InspectTaskInfo, options: RunnerOptions | None) -> TaskRunner:
        async with self._opening:
            if self._runner is None or not self._runner.is_open:
                await self._idle.wait()
                await _PROCESS.acquire()
                try:
                    runner = TaskRunner(task, options)
                    await runner.__aenter__()
                except BaseException:
                    _PROCESS.release()
                    raise
                self._runner = runner
            self._holders += 1
            self._idle.clear()
            return self._runner

    async def release(self) -> None:
        self._holders -= 1
        if self._holders > 0 or self._runner is None:
            return
        runner, self._runner = self._runner, None
        try:
            await runner.__aexit__(None, None, None)
        finally:
            _PROCESS.release()
            self._idle.set()


class _ProcessLock:
    """First come, first served, across threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[Future[None]] = deque()

    async def acquire(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn: Future[None] = Future()
            self._waiting.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # It was granted at the same moment.
                self.release()
            raise

    def release(self) -> None:
        with self._mutex:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._held = False


_PROCESS = _ProcessLock()


_POOLS: WeakKeyDictionary[asyncio.AbstractEventLoop, RunnerPool] = WeakKeyDictionary()


def shared_pool() -> RunnerPool:
    loop = asyncio.get_running_loop()
    return _POOLS.setdefault(loop, RunnerPool())
