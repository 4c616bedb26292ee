"""`EngineThread`: the one thread that owns torch; training jobs run between sampling steps.

Everything reaches it through a queue and answers through futures. A job that fails resolves its future
with the error; the thread goes on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tinkerscript.engine.batch import Request, RunningBatch
from tinkerscript.errors import EngineError

T = TypeVar("T")
Job = tuple[Callable[[], Any], "Future[Any]"]
Sampling = tuple[RunningBatch, Request]


class EngineThread:
    """Runs jobs in the order of their submission and keeps every busy `RunningBatch` decoding."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Job | Sampling | None] = queue.SimpleQueue()
        self._batches: list[RunningBatch] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tinkerscript-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread."""
        future: Future[T] = Future()
        self._put((function, future))
        return future

    def sample(self, batch: RunningBatch, request: Request) -> None:
        """Let `request` join `batch` at its next step."""
        self._put((batch, request))

    def close(self) -> None:
        """Fail what is unfinished and end the thread."""
        if not self._closed.is_set():
            self._closed.set()
            self._inbox.put(None)
        self._thread.join()

    def _put(self, item: Job | Sampling) -> None:
        if self._closed.is_set():
            raise EngineError("the engine is closed")
        self._inbox.put(item)

    def _run(self) -> None:
        while self._drain(block=not self._batches):
            for batch in list(self._batches):
                self._advance(batch)
        self._fail_rest(EngineError("the engine is closed"))

    def _drain(self, *, block: bool) -> bool:
        """Take everything that waits; False when the thread should end."""
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if item is None:
                return False
            self._accept(item)
            block = False

    def _accept(self, item: Job | Sampling) -> None:
        subject, detail = item
        if isinstance(subject, RunningBatch):
            assert isinstance(detail, Request)
            subject.submit(detail)
            if subject not in self._batches:
                self._batches.append(subject)
            return
        assert isinstance(detail, Future)
        if not detail.set_running_or_notify_cancel():
            return
        try:
            detail.set_result(subject())
        except BaseException as error:  # noqa: BLE001 - whoever awaits the future gets it
            detail.set_exception(error)

    def _advance(self, batch: RunningBatch) -> None:
        try:
            batch.advance()
        except Exception as error:  # noqa: BLE001 - whoever awaits the rows gets it
            batch.fail(error)
        if not batch.busy:
            self._batches.remove(batch)

    def _fail_rest(self, error: EngineError) -> None:
        for batch in self._batches:
            batch.fail(error)
        while not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                continue
            future: Future[Any] = item[1].future if isinstance(item[1], Request) else item[1]
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
