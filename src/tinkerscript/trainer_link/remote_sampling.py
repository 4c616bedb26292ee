"""Model calls over the link: `LinkSampler` at the server, `SampleService` at the trainer.

Whichever process restarts, a call is answered once, or refused within its time limit with a status that says
whether to retry. The trainer never runs a request twice at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tinkerscript.errors import EngineError, GatewayError
from tinkerscript.sampler import (
    Progress,
    ProgressCallback,
    SampleFunction,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.messages import (
    CancelSample,
    Sample,
    Sampled,
    SampleFailed,
    SampleProgress,
    Tagged,
)

logger = logging.getLogger(__name__)


class SampleLink(Protocol):
    connected: bool

    def send(self, message: Tagged) -> None: ...


@dataclass(slots=True, eq=False)
class _Pending:
    message: Sample
    answer: asyncio.Future[SampleResult]
    progress: ProgressCallback | None
    sent_at: float = field(default=0.0)


class LinkSampler(Sampler):
    def __init__(self, link: SampleLink, *, timeout_s: float, times: LinkTimes | None = None) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._times = times or LinkTimes()
        # Random, so late answers match no request of a restarted server.
        self._ids = itertools.count(secrets.randbits(31) << 32)
        self._pending: dict[int, _Pending] = {}
        self._closed = False

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
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
        """The trainer may be new, or have missed some requests."""
        for pending in self._pending.values():
            self._send(pending)

    def resend(self) -> None:
        """Repeat old requests. The trainer ignores those that it is running."""
        due = asyncio.get_running_loop().time() - self._times.resend_s
        for pending in self._pending.values():
            if 0 < pending.sent_at <= due:
                self._send(pending)

    def engine_unavailable(self) -> None:
        """Refuse the requests, because no trainer came within the grace period."""
        for pending in self._pending.values():
            if pending.sent_at and not pending.answer.done():
                pending.answer.set_exception(_unavailable(self._times.grace_s))

    def close(self) -> None:
        self._closed = True
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(_shutting_down())

    def message(self, message: Sampled | SampleProgress | SampleFailed) -> None:
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
    return GatewayError(
        503, "engine_unavailable", f"no trainer or engine has been connected for {grace_s:g} s; retry"
    )


def _shutting_down() -> GatewayError:
    return GatewayError(503, "engine_unavailable", "the server is shutting down; retry")


class SampleService:
    def __init__(self, sampler: SampleFunction, send: Callable[[Tagged], None]) -> None:
        self._sampler = sampler
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled = set[asyncio.Task[None]]()
        # One message per request and event-loop iteration.
        self._reports: dict[int, list[Progress]] = {}

    def start(self, message: Sample) -> None:
        if message.request_id in self._tasks:
            return
        task = asyncio.create_task(self._serve(message))
        self._tasks[message.request_id] = task
        task.add_done_callback(self._cancelled.discard)

    def cancel(self, request_id: int) -> None:
        task = self._tasks.pop(request_id, None)
        if task is not None:
            self._cancelled.add(task)
            task.cancel()

    def cancel_all(self) -> None:
        for request_id in list(self._tasks):
            self.cancel(request_id)

    async def close(self) -> None:
        self.cancel_all()
        await asyncio.gather(*self._cancelled, return_exceptions=True)

    async def _serve(self, message: Sample) -> None:
        answer = await self._answer(message)
        self._tasks.pop(message.request_id, None)
        self._send(answer)

    async def _answer(self, message: Sample) -> Sampled | SampleFailed:
        try:
            progress = partial(self._report, message.request_id) if message.request.stream else None
            result = await self._sampler(message.request, progress)
        except GatewayError as error:
            return _failed(message, error.status, error.code, error.message, error.param)
        except ValueError as error:
            return _failed(message, 400, "invalid_request", str(error))
        except EngineError as error:
            logger.warning("sample.failed request_id=%d error=%s", message.request_id, error)
            return _failed(message, 500, "engine_error", str(error))
        except Exception as error:
            logger.exception("sample.crashed request_id=%d", message.request_id)
            return _failed(message, 500, "engine_error", f"the engine raised {type(error).__name__}")
        return Sampled(request_id=message.request_id, result=result)

    def _report(self, request_id: int, report: Progress) -> None:
        if not self._reports:
            asyncio.get_running_loop().call_soon(self._send_reports)
        self._reports.setdefault(request_id, []).append(report)

    def _send_reports(self) -> None:
        reports, self._reports = self._reports, {}
        for request_id, progress in reports.items():
            if request_id in self._tasks:
                self._send(SampleProgress(request_id=request_id, reports=progress))


def _failed(message: Sample, status: int, code: str, text: str, param: str | None = None) -> SampleFailed:
    return SampleFailed(request_id=message.request_id, status=status, code=code, message=text, param=param)
