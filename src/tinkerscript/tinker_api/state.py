"""`WireState`: what all endpoints share, and how much of it stays in memory.

A training run's weights are in memory until its session ends. Samplers over one checkpoint, or over the base
model, share one copy of the weights; the least recently used copies are evicted and reloaded from disk when
needed. Evicted weights that were never saved are gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.errors import WireError
from tinkerscript.tinker_api.futures import Futures
from tinkerscript.tinker_api.records import Checkpoint, Checkpoints, ClientSession, SamplerRecord, Sessions


@dataclass(frozen=True, slots=True)
class WireLimits:
    """How much the server accepts before it asks clients to wait."""

    runs: int = 8
    """Training runs in memory, each with its own adapter or weights, gradients and moments."""

    samplers: int = 32
    """Sets of weights kept for sampling."""

    waiting_samples: int = 8192
    """Sequences running or waiting; a request beyond that gets 429."""

    waiting_requests: int = 4096
    """Requests of all kinds whose results are still kept."""

    body_bytes: int = 64 * 1024 * 1024
    poll_s: float = 30.0
    """Longest wait for a result in one request; the SDK gives up after 45."""

    session_timeout_s: float = 300.0
    """A session without a heartbeat for this long is over; the SDK sends one every 10."""


@dataclass(slots=True)
class Run:
    """A training run in memory."""

    client: EmbeddedTrainingClient
    session_id: str
    last_seq: int = 0


class WireState:
    """One engine, the server's folder under `root`, and what clients created."""

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
        """The name of the served model, if `name` is it or its folder. Raises WireError."""
        if name == self.name or Path(name).expanduser().resolve() == self.engine.folder.resolve():
            return self.name
        raise WireError(400, f"{field}: this server has {self.name!r}, not {name!r}")

    def checkpoint(self, path: str, *, field: str = "path") -> Checkpoint:
        """A checkpoint that the engine can load. Raises WireError 404, or 400 for one of another kind."""
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
        """A run in memory. Counts as a heartbeat of its session. Raises WireError 404 or 410."""
        if model_id in self.runs:
            self.sessions.active(self.runs[model_id].session_id)
            return self.runs[model_id]
        self.sessions.run(model_id)
        raise WireError(
            404,
            f"model_id: the training run {model_id} is over: its session ended or the server restarted; go "
            "on with create_training_client_from_state_with_optimizer from one of its checkpoints",
        )

    def check_room(self) -> None:
        """Raises WireError 429, on which the SDK waits and retries, at `limits.waiting_requests`."""
        if len(self.futures) >= self.limits.waiting_requests:
            raise WireError(
                429, f"{len(self.futures)} requests are waiting or not fetched yet; the limit is reached"
            )

    def keep_snapshot(self, sampler_id: str, client: EmbeddedSamplingClient) -> None:
        """Keep unsaved weights for `sampler_id`."""
        ready: asyncio.Future[EmbeddedSamplingClient] = asyncio.get_running_loop().create_future()
        ready.set_result(client)
        self._weights[sampler_id] = ready
        self._trim()

    async def weights_of(self, sampler: SamplerRecord) -> EmbeddedSamplingClient:
        """The client over a sampler's weights, from disk if needed. Raises WireError if they are gone."""
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
        """Drop the weights of a checkpoint that was deleted or overwritten."""
        self._weights.pop(path, None)

    def end(self, session: ClientSession, how: str) -> None:
        """Finish a session and free what it holds in memory."""
        self.sessions.finish(session, how)
        self.futures.cancel_session(session.session_id)
        for run_id in session.runs:
            self.runs.pop(run_id, None)
        for sampler_id in session.samplers:
            self._weights.pop(sampler_id, None)

    def housekeeping(self) -> None:
        """End sessions without heartbeats; delete expired checkpoints."""
        for session in self.sessions.silent():
            self.end(session, "no heartbeat")
        self.checkpoints.delete_expired()
