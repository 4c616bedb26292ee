"""`LinkSampler`: the gateway's sampler, answered by the trainer's engine at the other end of the link.

Invariant: a model call is answered once, or refused with a status that tells the caller whether to retry;
it never hangs past its time limit, whichever process restarts.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass, field
from typing import Protocol

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.sampler import Sampler, SampleRequest, SampleResult, Tell
from tinkerscript.server.messages import CancelSample, Sample, Sampled, SampleFailed, SampleProgress, Tagged
from tinkerscript.server.wire import LinkTimes


class TrainerConnection(Protocol):
    """What the sampler needs of the link."""

    connected: bool

    def send(self, message: Tagged) -> None: ...


@dataclass(slots=True, eq=False)
class _Pending:
    message: Sample
    answer: asyncio.Future[SampleResult]
    progress: Tell | None
    sent_at: float = field(default=0.0)


class LinkSampler(Sampler):
    """Sends `Sample`, awaits `Sampled`; what is on its way is sent again when a trainer (re)connects."""

    def __init__(self, link: TrainerConnection, *, timeout_s: float, times: LinkTimes | None = None) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._times = times or LinkTimes()
        # An answer meant for a former server process must not match a request of this one.
        self._ids = itertools.count(secrets.randbits(31) << 32)
        self._pending: dict[int, _Pending] = {}
        self._closed = False

    async def sample(self, request: SampleRequest, progress: Tell | None = None) -> SampleResult:
        loop = asyncio.get_running_loop()
        message = Sample(request_id=next(self._ids), request=request)
        pending = _Pending(message, loop.create_future(), progress)
        self._pending[pending.message.request_id] = pending
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._answer(pending)
        except TimeoutError:
            raise GatewayError(
                504, "engine_timeout", f"the engine did not answer within {self._timeout_s:g} s"
            ) from None
        finally:
            del self._pending[pending.message.request_id]
            if pending.sent_at and (not pending.answer.done() or pending.answer.cancelled()):
                self._link.send(CancelSample(request_id=pending.message.request_id))

    async def _answer(self, pending: _Pending) -> SampleResult:
        if self._closed:
            raise _shutting_down()
        if self._link.connected:
            self._send(pending)
            return await pending.answer
        timer = asyncio.get_running_loop().call_later(self._times.grace_s, self._give_up, pending)
        try:
            return await pending.answer
        finally:
            timer.cancel()

    def _give_up(self, pending: _Pending) -> None:
        if not pending.sent_at and not pending.answer.done():
            pending.answer.set_exception(_unavailable(self._times.grace_s))

    def _send(self, pending: _Pending) -> None:
        pending.sent_at = asyncio.get_running_loop().time()
        self._link.send(pending.message)

    def trainer_connected(self) -> None:
        """The trainer may be new, or may have missed requests: send all of them (again)."""
        for pending in self._pending.values():
            self._send(pending)

    def resend(self) -> None:
        """Send again what has waited long: the trainer ignores what it is working on."""
        due = asyncio.get_running_loop().time() - self._times.resend_s
        for pending in self._pending.values():
            if 0 < pending.sent_at <= due:
                self._send(pending)

    def engine_unavailable(self) -> None:
        """No trainer came back within the grace: refuse what the last one was asked for."""
        for pending in self._pending.values():
            if pending.sent_at and not pending.answer.done():
                pending.answer.set_exception(_unavailable(self._times.grace_s))

    def close(self) -> None:
        """The server shuts down: refuse what waits and what comes."""
        self._closed = True
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(_shutting_down())

    def message(self, message: Sampled | SampleProgress | SampleFailed) -> None:
        """An answer, or tokens on the way to one; what nobody waits for any more is dropped."""
        pending = self._pending.get(message.request_id)
        if pending is None or pending.answer.done():
            return
        if isinstance(message, Sampled):
            pending.answer.set_result(message.result)
        elif isinstance(message, SampleProgress):
            if pending.progress is not None:
                for report in message.reports:
                    pending.progress(report)
        else:
            pending.answer.set_exception(
                GatewayError(message.status, message.code, message.message, param=message.param)
            )


def _unavailable(grace_s: float) -> GatewayError:
    return GatewayError(503, "engine_unavailable", f"no trainer has been connected for {grace_s:g} s; retry")


def _shutting_down() -> GatewayError:
    return GatewayError(503, "engine_unavailable", "the server is shutting down; retry")
