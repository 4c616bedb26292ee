"""`Sessions`: who uses the server, and the runs and samplers that belong to each.

A session is on disk from its creation, so that a client which outlives the server goes on sampling from
checkpoints. A session that is finished, or silent for `timeout_s`, loses what it holds in memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinkerscript.errors import WireError
from tinkerscript.tinker_api.checkpoints import write_json

FORGET_AFTER = timedelta(days=30)


@dataclass(slots=True)
class SamplerRecord:
    """One sampling session; `model_path` None and not `snapshot`: the base model."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
    snapshot: bool = False
    """Weights that were never saved: only the process that made them has them."""

    clones: int = 0
    """Clients beyond the first that joined."""


@dataclass(slots=True)
class RunRecord:
    run_id: str
    base_model: str
    last_request: str
    user_metadata: dict[str, Any] | None = None


@dataclass(slots=True)
class ClientSession:
    session_id: str
    created: str
    user_metadata: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    display_name: str | None = None
    finished: str | None = None
    """How it ended; None while it has not."""

    samplers: dict[str, SamplerRecord] = field(default_factory=lambda: dict[str, SamplerRecord]())
    runs: dict[str, RunRecord] = field(default_factory=lambda: dict[str, RunRecord]())


class Sessions:
    """Every session on disk under `root`. `clock` is in seconds."""

    def __init__(self, root: Path, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._timeout_s = timeout_s
        self._clock = clock
        self._sessions: dict[str, ClientSession] = {}
        self._last_seen: dict[str, float] = {}
        root.mkdir(parents=True, exist_ok=True)
        for path in sorted(root.glob("[!.]*.json")):
            self._restore(path)

    def _restore(self, path: Path) -> None:
        session = _read(path)
        if datetime.fromisoformat(session.created) < datetime.now(UTC) - FORGET_AFTER:
            path.unlink()
            return
        session.samplers = {i: s for i, s in session.samplers.items() if not s.snapshot}
        self._sessions[session.session_id] = session
        if session.finished is None:
            self._last_seen[session.session_id] = self._clock()

    def create(self, *, user_metadata: dict[str, Any], display_name: str | None) -> ClientSession:
        session = ClientSession(str(uuid4()), now(), user_metadata, display_name)
        self._sessions[session.session_id] = session
        self._last_seen[session.session_id] = self._clock()
        self.save(session)
        return session

    def active(self, session_id: str) -> ClientSession:
        """A session that has not ended; hearing from it keeps it. Raises WireError 410 or 404."""
        session = self.get(session_id)
        if session.finished is not None:
            raise WireError(410, f"session_id: the session {session_id} is over ({session.finished})")
        self._last_seen[session_id] = self._clock()
        return session

    def get(self, session_id: str) -> ClientSession:
        if session_id not in self._sessions:
            raise WireError(404, f"session_id: no session {session_id!r}")
        return self._sessions[session_id]

    def all(self) -> list[ClientSession]:
        """Newest first."""
        return sorted(self._sessions.values(), key=lambda session: session.created, reverse=True)

    def sampler(self, sampler_id: str) -> tuple[ClientSession, SamplerRecord]:
        """Raises WireError 404 for one that is not known."""
        session = self._sessions.get(sampler_id.partition(":sample:")[0])
        if session is None or sampler_id not in session.samplers:
            raise WireError(
                404,
                f"sampling_session_id: no sampler {sampler_id!r}; one over weights that were not saved does "
                "not outlive the server: save_weights_for_sampler(name) and create_sampling_client(path) do",
            )
        return session, session.samplers[sampler_id]

    def run(self, run_id: str) -> tuple[ClientSession, RunRecord]:
        """Raises WireError 404 for one that is not known."""
        session = self._sessions.get(run_id.partition(":train:")[0])
        if session is None or run_id not in session.runs:
            raise WireError(404, f"model_id: no training run {run_id!r}")
        return session, session.runs[run_id]

    def finish(self, session: ClientSession, how: str) -> None:
        """The first reason stays."""
        if session.finished is None:
            session.finished = how
            self._last_seen.pop(session.session_id, None)
            self.save(session)

    def silent(self) -> list[ClientSession]:
        """Sessions that were not heard from for too long."""
        limit = self._clock() - self._timeout_s
        return [self._sessions[id_] for id_, seen in self._last_seen.items() if seen < limit]

    def save(self, session: ClientSession) -> None:
        write_json(self._root / f"{session.session_id}.json", asdict(session))


def now() -> str:
    return datetime.now(UTC).isoformat()


def _read(path: Path) -> ClientSession:
    data = json.loads(path.read_text(encoding="utf-8"))
    samplers = {id_: SamplerRecord(**record) for id_, record in data.pop("samplers").items()}
    runs = {id_: RunRecord(**record) for id_, record in data.pop("runs").items()}
    return ClientSession(**data, samplers=samplers, runs=runs)
