"""The runner that a process shares between its environments.

Invariant: a runner is open exactly while someone holds a lease on it, so that other evals can run in between;
leases are granted in the order in which they were asked for, so that no task starves another one.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from inspect_tinker_bridge.runner import RunnerOptions, TaskRunner
from inspect_tinker_bridge.tasks import InspectTaskInfo


class RunnerPool:
    """Hands out one open TaskRunner at a time, to any number of holders. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turnstile = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: TaskRunner | None = None
        self._key: object = None
        self._holders = 0

    async def acquire(self, task: InspectTaskInfo, options: RunnerOptions | None = None) -> TaskRunner:
        """An open runner of the task; waits while another one is held. Raises RunnerError.

        Every `acquire` needs a `release`.
        """
        key = (id(task), options or RunnerOptions())
        async with self._turnstile:
            if self._runner is None or self._key != key or not self._runner.is_open:
                await self._idle.wait()
                runner = TaskRunner(task, options)
                await runner.__aenter__()
                self._runner, self._key = runner, key
            self._holders += 1
            self._idle.clear()
            return self._runner

    async def release(self) -> None:
        """Give a lease back; the last one closes the runner."""
        self._holders -= 1
        if self._holders > 0 or self._runner is None:
            return
        runner, self._runner = self._runner, None
        try:
            await runner.__aexit__(None, None, None)
        finally:
            self._idle.set()


_POOLS: WeakKeyDictionary[asyncio.AbstractEventLoop, RunnerPool] = WeakKeyDictionary()


def shared_pool() -> RunnerPool:
    """The pool of the running event loop."""
    loop = asyncio.get_running_loop()
    return _POOLS.setdefault(loop, RunnerPool())
