"""Where a solver's model calls wait for whoever drives the episode.

Invariant: every call that `generate` accepts is taken from `calls` or fails with the limit that `finish` set.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from inspect_ai.model import ModelOutput
from inspect_ai.util import LimitExceededError

from inspect_tinker_bridge.episodes import GenerateRequest


@dataclass(frozen=True)
class PendingCall:
    """A model call whose `reply` the solver awaits."""

    request: GenerateRequest
    reply: asyncio.Future[ModelOutput]


class Turnstile:
    """The policy that the solver sees: each model call waits in line until the driver answers it."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[PendingCall] = asyncio.Queue()
        self._limit: LimitExceededError | None = None
        self._waiting: set[asyncio.Future[ModelOutput]] = set()

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        """Wait for the answer. Raises the limit of `finish` from then on."""
        if self._limit is not None:
            raise self._limit
        reply: asyncio.Future[ModelOutput] = asyncio.get_running_loop().create_future()
        self._waiting.add(reply)
        try:
            await self.calls.put(PendingCall(request, reply))
            return await reply
        finally:
            self._waiting.discard(reply)

    def finish(self, limit: LimitExceededError) -> None:
        """End the solver, at this call or its next one; the scorers still run."""
        self._limit = limit
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(limit)

    async def next_call(self, episode: asyncio.Future[Any]) -> PendingCall | None:
        """The next model call, or None once `episode` has ended."""
        if episode.done():
            return None
        waiter = asyncio.ensure_future(self.calls.get())
        try:
            await asyncio.wait({waiter, episode}, return_when=asyncio.FIRST_COMPLETED)
            return waiter.result() if waiter.done() else None
        finally:
            waiter.cancel()
