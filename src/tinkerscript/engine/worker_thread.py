"""`EngineThread`: the one thread that owns torch, on which training and sampling take turns.

Work reaches it through a queue and is answered through futures. Jobs run in the order in which they are
submitted, long ones in slices. After each slice, sampling gets the thread for as long as the slice took, so
a token waits for at most one slice and neither side starves the other.

Invariant: every future resolves. A job that fails resolves its future with the error, and the thread goes on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkerscript.engine.running_batch import Request, RunningBatch
from tinkerscript.errors import EngineError

T = TypeVar("T")
Slices = Generator[None, None, T]
"""Work that yields where sampling may go on, and returns the result."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work that `begin` starts; its result goes to `future`."""

    begin: Callable[[], Slices[Any]]
    future: Future[Any]


Sampling = tuple[RunningBatch, Request]


class EngineThread:
    """Runs jobs in order and keeps every busy `RunningBatch` decoding."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Job | Sampling | None] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._running: tuple[Slices[Any], Future[Any]] | None = None
        self._batches: list[RunningBatch] = []
        self._ended = False
        self._closed = False
        self._entrance = threading.Lock()
        """Held while putting into the inbox, so that the item that closes the engine is the last."""

        self._thread = threading.Thread(target=self._run, name="tinkerscript-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread as one slice."""

        def whole() -> Slices[T]:
            return function()
            yield

        return self.call_in_slices(whole)

    def call_in_slices(self, begin: Callable[[], Slices[T]]) -> Future[T]:
        """Run a generator on the engine's thread. Where it yields, sampling goes on; other jobs wait."""
        future: Future[T] = Future()
        self._put(Job(begin, future))
        return future

    def sample(self, batch: RunningBatch, request: Request) -> None:
        """Add `request` to `batch` at its next step."""
        self._put((batch, request))

    def close(self) -> None:
        """Fail unfinished work and end the thread."""
        with self._entrance:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

    def _put(self, item: Job | Sampling) -> None:
        with self._entrance:
            if self._closed:
                raise EngineError("the engine is closed")
            self._inbox.put(item)

    def _run(self) -> None:
        while not self._ended:
            self._receive(block=not (self._batches or self._jobs or self._running))
            began = time.monotonic()
            self._work()
            self._decode(time.monotonic() - began)
        self._fail_rest(EngineError("the engine is closed"))

    def _receive(self, *, block: bool) -> None:
        """Take everything from the inbox."""
        while not self._ended:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if item is None:
                self._ended = True
            elif isinstance(item, Job):
                self._jobs.append(item)
            else:
                self._join(*item)

    def _join(self, batch: RunningBatch, request: Request) -> None:
        batch.submit(request)
        if batch not in self._batches:
            self._batches.append(batch)

    def _work(self) -> None:
        """Run one slice of the current job, or of the next one that was not canceled."""
        while self._running is None and self._jobs and not self._ended:
            job = self._jobs.popleft()
            if job.future.set_running_or_notify_cancel():
                self._running = job.begin(), job.future
        if self._running is None or self._ended:
            return
        slices, future = self._running
        try:
            next(slices)
        except StopIteration as end:
            self._running = None
            future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - the future carries it
            self._running = None
            future.set_exception(error)

    def _decode(self, seconds: float) -> None:
        """Step every batch once; while there are jobs, keep stepping for `seconds`."""
        until = time.monotonic() + (seconds if self._running or self._jobs else 0)
        while self._batches and not self._ended:
            for batch in list(self._batches):
                self._advance(batch)
            if time.monotonic() >= until:
                return
            self._receive(block=False)

    def _advance(self, batch: RunningBatch) -> None:
        try:
            batch.advance()
        except Exception as error:  # noqa: BLE001 - the futures carry it
            batch.fail(error)
        if not batch.busy:
            self._batches.remove(batch)

    def _fail_rest(self, error: EngineError) -> None:
        for batch in self._batches:
            batch.fail(error)
        if self._running is not None:
            self._running[1].set_exception(error)
        for job in self._jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
