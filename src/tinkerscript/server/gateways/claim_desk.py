"""`ClaimDesk`: what answers one gateway process in the server, over the server's claims and sampler.

Invariant: what a process has begun ends with it, so that a claim whose process died expires like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from tinkerscript.errors import GatewayError, StoreError
from tinkerscript.gateway.sampler import Sampler
from tinkerscript.server.claims import LeasedClaims
from tinkerscript.server.gateways.channel import (
    Answer,
    Ask,
    AskBegin,
    AskCalls,
    AskOpen,
    AskRecord,
    AskRefused,
    CallOver,
    FromGateway,
    Ready,
)
from tinkerscript.trainer_link.messages import CancelSample, Sample, Tagged
from tinkerscript.trainer_link.remote_sampling import SampleService

logger = logging.getLogger(__name__)


class ClaimDesk:
    """Answers one process, from its start to its end."""

    def __init__(
        self,
        number: int,
        claims: LeasedClaims,
        sampler: Sampler,
        *,
        send: Callable[[Tagged], None],
        ready: Callable[[], None],
    ) -> None:
        """`send`: to the process; `ready` is called when it takes connections."""
        self._number = number
        self._claims = claims
        self._samples = SampleService(sampler.sample, send, relays=True)
        self._send = send
        self._ready = ready
        self._begun: dict[int, tuple[AskBegin, int]] = {}
        """Ask id -> what was asked for, and the tokens that were allowed."""

        self._tasks = set[asyncio.Task[None]]()

    def take(self, message: FromGateway) -> None:
        """Answer a message, at once if that needs no store."""
        match message:
            case AskRecord() | AskCalls():
                task = asyncio.create_task(self._look_up(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case AskOpen() | AskBegin():
                try:
                    self._send(self._answer(message))
                except GatewayError as error:
                    self._refuse(message, error)
            case CallOver():
                self._end(message.ask_id)
            case Sample():
                self._samples.start(message)
            case CancelSample():
                self._samples.cancel(message.request_id)
            case Ready():
                self._ready()

    async def close(self) -> None:
        """The process is gone: end what it had begun. What it sent to be recorded is recorded."""
        for ask_id in list(self._begun):
            self._end(ask_id)
        await self._samples.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _answer(self, ask: AskOpen | AskBegin) -> Answer:
        if isinstance(ask, AskOpen):
            return Answer(ask_id=ask.ask_id, claim=self._claims.opened(ask.key, gateway=self._number))
        granted = self._claims.reserve(ask.claim, ask.num_samples, ask.max_tokens)
        self._begun[ask.ask_id] = (ask, granted)
        return Answer(ask_id=ask.ask_id, max_tokens=granted)

    def _end(self, ask_id: int) -> None:
        if begun := self._begun.pop(ask_id, None):
            ask, granted = begun
            self._claims.end(ask.claim, ask.num_samples, granted)

    async def _look_up(self, ask: AskRecord | AskCalls) -> None:
        try:
            if isinstance(ask, AskRecord):
                await self._claims.record(ask.claim, ask.calls)
                answer = Answer(ask_id=ask.ask_id)
            else:
                answer = Answer(ask_id=ask.ask_id, calls=await self._claims.calls(ask.claim))
        except GatewayError as error:
            self._refuse(ask, error)
        except StoreError as error:
            self._refuse(ask, GatewayError(503, "store_unavailable", str(error)))
        else:
            self._send(answer)

    def _refuse(self, ask: Ask, error: GatewayError) -> None:
        self._send(AskRefused(ask_id=ask.ask_id, status=error.status, code=error.code, message=error.message))
