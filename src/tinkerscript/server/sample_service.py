"""`SampleService`: the trainer's side of model calls; each `Sample` becomes a task that answers it.

Invariant: a request is worked on once at a time, its task is owned and awaited, and whatever the engine
raises becomes a `SampleFailed` with a status for the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from tinkerscript.errors import EngineError, GatewayError
from tinkerscript.gateway.sampler import Progress, SampleFunction
from tinkerscript.server.messages import Sample, Sampled, SampleFailed, SampleProgress, Tagged

logger = logging.getLogger(__name__)


class SampleService:
    """Runs `sampler` for every request and hands the answers to `send`."""

    def __init__(self, sampler: SampleFunction, send: Callable[[Tagged], None]) -> None:
        self._sampler = sampler
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled = set[asyncio.Task[None]]()
        self._reports: dict[int, list[Progress]] = {}
        """What is to be told, by request: one message of each in a turn of the event loop."""

    def start(self, message: Sample) -> None:
        """Work on a request, unless it is being worked on."""
        if message.request_id in self._tasks:
            return
        task = asyncio.create_task(self._serve(message))
        self._tasks[message.request_id] = task
        task.add_done_callback(self._cancelled.discard)

    def cancel(self, request_id: int) -> None:
        """Nobody waits for this one any more."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            self._cancelled.add(task)
            task.cancel()

    def cancel_all(self) -> None:
        """The server that asked is gone."""
        for request_id in list(self._tasks):
            self.cancel(request_id)

    async def close(self) -> None:
        """Cancel everything and wait until it is over."""
        self.cancel_all()
        await asyncio.gather(*self._cancelled, return_exceptions=True)

    async def _serve(self, message: Sample) -> None:
        answer = await self._answer(message)
        self._tasks.pop(message.request_id, None)
        self._send(answer)

    async def _answer(self, message: Sample) -> Sampled | SampleFailed:
        try:
            tell = partial(self._tell, message.request_id) if message.request.stream else None
            result = await self._sampler(message.request, tell)
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

    def _tell(self, request_id: int, report: Progress) -> None:
        if not self._reports:
            asyncio.get_running_loop().call_soon(self._send_reports)
        self._reports.setdefault(request_id, []).append(report)

    def _send_reports(self) -> None:
        reports, self._reports = self._reports, {}
        for request_id, news in reports.items():
            if request_id in self._tasks:
                self._send(SampleProgress(request_id=request_id, reports=news))


def _failed(message: Sample, status: int, code: str, text: str, param: str | None = None) -> SampleFailed:
    return SampleFailed(request_id=message.request_id, status=status, code=code, message=text, param=param)
