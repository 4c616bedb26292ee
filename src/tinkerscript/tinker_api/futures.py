"""`Futures`: requests that clients start now and fetch the results of later.

Invariant: a request that is sent again (the reply was lost) runs once. Its key maps to the same future for as
long as the future is kept, and a fetched result is kept for a while so that it can be fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import tinker

from tinkerscript.errors import EngineRequestError, TinkerScriptError, WireError

FutureResult = tinker.SampleResponse | tinker.ForwardBackwardOutput | dict[str, Any]
"""What `codec.write_result` writes; a JSON object goes out as it is."""


KEEP_FETCHED_S = 60.0
KEEP_UNFETCHED_S = 1800.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pending:
    """One started request."""

    key: Hashable
    task: asyncio.Task[FutureResult]
    session_id: str
    samples: int
    forget_at: float = float("inf")


class Futures:
    """Requests by id. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: dict[str, Pending] = {}
        self._ids: dict[Hashable, str] = {}
        self._closing = asyncio.Event()
        self.samples = 0
        """Sequences of the requests that are still running."""

    def __len__(self) -> int:
        return len(self._pending)

    def known(self, key: Hashable) -> bool:
        """Whether the request with this key was started."""
        return key in self._ids

    def id_of(self, key: Hashable) -> str:
        return self._ids[key]

    def running(self, key: Hashable) -> bool:
        """Whether the request with this key was started and is not done."""
        request_id = self._ids.get(key)
        return request_id is not None and not self._pending[request_id].task.done()

    def begin(
        self, key: Hashable, work: Callable[[], Awaitable[FutureResult]], *, session_id: str, samples: int = 0
    ) -> str:
        """Start `work` and return its id; for a known key, return the id it already has.

        Work starts in the order of these calls.
        """
        self._sweep()
        found = self._ids.get(key)
        if found is not None:
            return found
        request_id = uuid4().hex
        task = asyncio.ensure_future(_awaited(work))
        self._pending[request_id] = Pending(key, task, session_id, samples)
        self.samples += samples
        self._ids[key] = request_id
        task.add_done_callback(lambda _: self._finished(request_id))
        return request_id

    async def fetch(self, request_id: str, timeout_s: float) -> FutureResult | None:
        """The result, or None if it takes longer than `timeout_s`; an error is a result too.

        Raises WireError 410 for an unknown id: the client then starts its request over.
        """
        pending = self._pending.get(request_id)
        if pending is None:
            raise WireError(
                410, f"request_id: no request {request_id!r}; it has expired, or the server restarted"
            )
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({pending.task, closing}, timeout=timeout_s, return_when=FIRST_COMPLETED)
        finally:
            closing.cancel()
        if not pending.task.done():
            return None
        pending.forget_at = min(pending.forget_at, self._clock() + KEEP_FETCHED_S)
        if pending.task.cancelled():
            return {"error": "the request was cancelled", "category": "user"}
        error = pending.task.exception()
        return pending.task.result() if error is None else failure(error)

    def cancel(self, request_id: str) -> None:
        """Stop a request if it is running; unknown ids are ignored."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.task.cancel()

    def cancel_session(self, session_id: str) -> None:
        """Stop a session's requests."""
        for pending in self._pending.values():
            if pending.session_id == session_id:
                pending.task.cancel()

    def release_waiting(self) -> None:
        """Answer every waiting fetch with "ask again", so that clients retry at the next server."""
        self._closing.set()

    async def close(self) -> None:
        """Stop all requests."""
        tasks = [pending.task for pending in self._pending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, request_id: str) -> None:
        pending = self._pending[request_id]
        pending.forget_at = self._clock() + KEEP_UNFETCHED_S
        self.samples -= pending.samples
        task = pending.task
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, TinkerScriptError):
            logger.error("wire.failed request_id=%s", request_id, exc_info=error)

    def _sweep(self) -> None:
        now = self._clock()
        for request_id in [id_ for id_, pending in self._pending.items() if pending.forget_at < now]:
            gone = self._pending.pop(request_id)
            with contextlib.suppress(KeyError):
                del self._ids[gone.key]


async def _awaited(work: Callable[[], Awaitable[FutureResult]]) -> FutureResult:
    return await work()


def failure(error: BaseException) -> dict[str, Any]:
    """An error as the SDK expects it: the category says whose fault it is."""
    wrong_request = isinstance(error, EngineRequestError) or (
        isinstance(error, WireError) and error.status < 500
    )
    if isinstance(error, TinkerScriptError):
        return {"error": str(error), "category": "user" if wrong_request else "server"}
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}
