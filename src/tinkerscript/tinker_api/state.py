"""The state that all endpoints share (`WireState`), and limits on its memory.

A client that lost the reply repeats its request and gets the same future. Samplers over the same weights
share a copy, and the least recently used copies are reloaded when needed; unsaved ones are lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import FIRST_COMPLETED
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.errors import EngineRequestError, TinkerScriptError, WireError
from tinkerscript.tinker_api.codec import FutureResult
from tinkerscript.tinker_api.records import Checkpoint, Checkpoints, ClientSession, SamplerRecord, Sessions

KEEP_FETCHED_S = 60.0
KEEP_UNFETCHED_S = 1800.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WireLimits:
    runs: int = 8
    """Runs in memory."""

    samplers: int = 32
    waiting_samples: int = 8192
    """Unfinished sequences. More get a 429."""

    waiting_requests: int = 4096  # Kept requests of all kinds.
    body_bytes: int = 64 * 1024 * 1024
    poll_s: float = 30.0
    """Seconds that a request waits for a result. The SDK gives up after 45 s."""

    session_timeout_s: float = 300.0
    """Seconds without a heartbeat that end a session. The SDK sends one every 10 s."""


@dataclass(slots=True)
class Run:
    client: EmbeddedTrainingClient
    session_id: str
    last_seq: int = 0


@dataclass(slots=True)
class Pending:
    key: Hashable
    task: asyncio.Task[FutureResult]
    session_id: str
    samples: int
    forget_at: float = float("inf")


class Futures:
    """Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: dict[str, Pending] = {}
        self._ids: dict[Hashable, str] = {}
        self._closing = asyncio.Event()
        self.samples = 0

    def __len__(self) -> int:
        return len(self._pending)

    def known(self, key: Hashable) -> bool:
        return key in self._ids

    def id_of(self, key: Hashable) -> str:
        return self._ids[key]

    def running(self, key: Hashable) -> bool:
        request_id = self._ids.get(key)
        return request_id is not None and not self._pending[request_id].task.done()

    def begin(
        self,
        key: Hashable,
        work: Callable[[], Coroutine[Any, Any, FutureResult]],
        *,
        session_id: str,
        samples: int = 0,
    ) -> str:
        """Start `work` unless the key is known, in the order of the calls. Returns its id."""
        self._sweep()
        found = self._ids.get(key)
        if found is not None:
            return found
        request_id = uuid4().hex
        task = asyncio.create_task(work())
        self._pending[request_id] = Pending(key, task, session_id, samples)
        self.samples += samples
        self._ids[key] = request_id
        task.add_done_callback(lambda _: self._finished(request_id))
        return request_id

    async def fetch(self, request_id: str, timeout_s: float) -> FutureResult | None:
        """Return the result or error, or None after `timeout_s`.

        Raises WireError 410 for an unknown id, so that the client starts over.
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
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.task.cancel()

    def cancel_session(self, session_id: str) -> None:
        for pending in self._pending.values():
            if pending.session_id == session_id:
                pending.task.cancel()

    def release_waiting(self) -> None:
        """Let waiting clients retry at the next server."""
        self._closing.set()

    async def close(self) -> None:
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
            self._ids.pop(self._pending.pop(request_id).key, None)


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error in the SDK's form, which blames the user or the server."""
    wrong_request = isinstance(error, EngineRequestError) or (
        isinstance(error, WireError) and error.status < 500
    )
    if isinstance(error, TinkerScriptError):
        return {"error": str(error), "category": "user" if wrong_request else "server"}
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}


class WireState:
    def __init__(self, engine: EmbeddedEngine, root: Path, *, name: str, limits: WireLimits) -> None:
        self.engine = engine
        self.name = name
        self.limits = limits
        self.futures = Futures()
        self.sessions = Sessions(root / "sessions", timeout_s=limits.session_timeout_s)
        self.checkpoints = Checkpoints(root / "checkpoints")
        self.runs: dict[str, Run] = {}
        self._weights: OrderedDict[str, asyncio.Future[EmbeddedSamplingClient]] = OrderedDict()

    def check_model(self, name: str, *, field: str = "base_model") -> str:
        """Return the served model's name. `name` may be its folder."""
        if name == self.name or Path(name).expanduser().resolve() == self.engine.folder.resolve():
            return self.name
        raise WireError(400, f"{field}: this server has {self.name!r}, not {name!r}")

    def checkpoint(self, path: str, *, field: str = "path") -> Checkpoint:
        found = self.checkpoints.find(path, field=field)
        if (found.lora_config is not None) == self.engine.is_lora:
            return found
        if self.engine.is_lora:
            raise WireError(
                400,
                f"{field}: {path} has all weights of a model, and this server trains adapters; "
                "start it with --full",
            )
        raise WireError(
            400,
            f"{field}: {path} is a LoRA adapter, and this server trains all weights; start it without --full",
        )

    def run(self, model_id: str) -> Run:
        """Return a run, and count a heartbeat."""
        if model_id in self.runs:
            self.sessions.active(self.runs[model_id].session_id)
            return self.runs[model_id]
        self.sessions.run(model_id)
        raise WireError(
            404,
            f"model_id: the training run {model_id} ended with its session or the server; continue from a "
            "checkpoint with create_training_client_from_state_with_optimizer",
        )

    def check_room(self) -> None:
        """Raise WireError 429 at the limit, so that the SDK retries."""
        if len(self.futures) >= self.limits.waiting_requests:
            raise WireError(
                429, f"{len(self.futures)} requests are waiting or not fetched yet; the limit is reached"
            )

    def keep_snapshot(self, sampler_id: str, client: EmbeddedSamplingClient) -> None:
        ready: asyncio.Future[EmbeddedSamplingClient] = asyncio.get_running_loop().create_future()
        ready.set_result(client)
        self._weights[sampler_id] = ready
        self._trim()

    async def weights_of(self, sampler: SamplerRecord) -> EmbeddedSamplingClient:
        """Raise WireError if the weights are lost."""
        key = sampler.sampler_id if sampler.snapshot else (sampler.model_path or "")
        found = self._weights.get(key)
        if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
            if sampler.snapshot:
                raise WireError(
                    404,
                    f"sampling_session_id: the weights of {key} were evicted ({self.limits.samplers} sets "
                    "are kept); save_weights_for_sampler(name) keeps weights on disk",
                )
            folder = None
            if sampler.model_path is not None:
                checkpoint = self.checkpoint(sampler.model_path, field="model_path")
                folder = self.checkpoints.folder(checkpoint)
            found = asyncio.ensure_future(self._load(folder))
            self._weights[key] = found
        self._weights.move_to_end(key)
        self._trim()
        return await asyncio.shield(found)

    async def _load(self, folder: Path | None) -> EmbeddedSamplingClient:
        return await self.engine.sample_copy(folder)

    def _trim(self) -> None:
        while len(self._weights) > self.limits.samplers:
            self._weights.popitem(last=False)

    def forget_path(self, path: str) -> None:
        self._weights.pop(path, None)

    def end(self, session: ClientSession, how: str) -> None:
        self.sessions.finish(session, how)
        self.futures.cancel_session(session.session_id)
        for run_id in session.runs:
            self.runs.pop(run_id, None)
        for sampler_id in session.samplers:
            self._weights.pop(sampler_id, None)

    def housekeeping(self) -> None:
        for session in self.sessions.silent():
            self.end(session, "no heartbeat")
        self.checkpoints.delete_expired()
