"""Sessions with their runs and samplers, and checkpoints, all on disk.

A checkpoint is a Hugging Face folder with a `NOTE`, at `tinker://RUN/weights/NAME` or
`tinker://RUN/sampler_weights/NAME`. Anything unknown raises WireError 404.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from tinkerscript.errors import WireError
from tinkerscript.files import write_atomically

FORGET_AFTER = timedelta(days=30)

NOTE = "tinker_checkpoint.json"

ARCHIVE_KINDS: Mapping[str, Literal["training", "sampler"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
}
"""Keys are the second part of a `tinker://` path."""

MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 24 * 3600

_RUN = re.compile(r"[A-Za-z0-9-]+:train:\d+")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(slots=True)
class SamplerRecord:
    sampler_id: str
    base_model: str
    model_path: str | None = None
    snapshot: bool = False  # Only this process has the weights.
    clones: int = 0


@dataclass(slots=True)
class RunRecord:
    run_id: str
    base_model: str
    last_request: str
    user_metadata: dict[str, Any] | None = None
    lora_config: dict[str, Any] | None = None
    """Tinker's `LoraConfig`; None if all weights train."""


@dataclass(slots=True)
class ClientSession:
    session_id: str
    created: str
    user_metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    display_name: str | None = None
    finished: str | None = None  # Why it ended; None while active.
    samplers: dict[str, SamplerRecord] = field(default_factory=dict[str, SamplerRecord])
    runs: dict[str, RunRecord] = field(default_factory=dict[str, RunRecord])


class Sessions:
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
        session = _read_session(path)
        if datetime.fromisoformat(session.created) < datetime.now(UTC) - FORGET_AFTER:
            path.unlink()
            return
        session.samplers = {i: s for i, s in session.samplers.items() if not s.snapshot}
        self._sessions[session.session_id] = session
        if session.finished is None:
            self._last_seen[session.session_id] = self._clock()

    def create(self, *, user_metadata: dict[str, Any], display_name: str | None) -> ClientSession:
        session = ClientSession(str(uuid4()), timestamp(), user_metadata, display_name)
        self._sessions[session.session_id] = session
        self._last_seen[session.session_id] = self._clock()
        self.save(session)
        return session

    def active(self, session_id: str) -> ClientSession:
        """Count a heartbeat. Raises WireError 410 for an ended session."""
        session = self.get(session_id)
        if session.finished is not None:
            raise WireError(410, f"session_id: the session {session_id} has ended ({session.finished})")
        self._last_seen[session_id] = self._clock()
        return session

    def get(self, session_id: str) -> ClientSession:
        if session_id not in self._sessions:
            raise WireError(404, f"session_id: no session {session_id!r}")
        return self._sessions[session_id]

    def all(self) -> list[ClientSession]:
        return sorted(self._sessions.values(), key=lambda session: session.created, reverse=True)

    def sampler(self, sampler_id: str) -> tuple[ClientSession, SamplerRecord]:
        session = self._sessions.get(sampler_id.partition(":sample:")[0])
        if session is None or sampler_id not in session.samplers:
            raise WireError(
                404,
                f"sampling_session_id: no sampler {sampler_id!r}; one over unsaved weights ends with the "
                "server: use save_weights_for_sampler(name) and create_sampling_client(path)",
            )
        return session, session.samplers[sampler_id]

    def run(self, run_id: str) -> tuple[ClientSession, RunRecord]:
        session = self._sessions.get(run_id.partition(":train:")[0])
        if session is None or run_id not in session.runs:
            raise WireError(404, f"model_id: no training run {run_id!r}")
        return session, session.runs[run_id]

    def finish(self, session: ClientSession, how: str) -> None:
        """The first reason is kept."""
        if session.finished is None:
            session.finished = how
            self._last_seen.pop(session.session_id, None)
            self.save(session)

    def silent(self) -> list[ClientSession]:
        limit = self._clock() - self._timeout_s
        return [self._sessions[id_] for id_, seen in self._last_seen.items() if seen < limit]

    def save(self, session: ClientSession) -> None:
        _write(self._root / f"{session.session_id}.json", asdict(session))


def timestamp() -> str:
    return datetime.now(UTC).isoformat()


def lora_reply(record: RunRecord | Checkpoint) -> dict[str, Any]:
    config = record.lora_config
    return {"is_lora": config is not None, "lora_rank": None if config is None else config["rank"]}


def _read_session(path: Path) -> ClientSession:
    data = json.loads(path.read_text(encoding="utf-8"))
    samplers = {id_: SamplerRecord(**record) for id_, record in data.pop("samplers").items()}
    runs = {id_: RunRecord(**record) for id_, record in data.pop("runs").items()}
    return ClientSession(**data, samplers=samplers, runs=runs)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Times are ISO 8601 with a time zone."""

    run_id: str
    kind: str
    """`weights` (with optimizer state) or `sampler_weights`."""

    name: str
    time: str
    base_model: str
    user_metadata: dict[str, str] | None = None
    expires_at: str | None = None
    public: bool = False
    lora_config: dict[str, Any] | None = None  # None if the checkpoint has all weights.

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    def expired(self, now: datetime) -> bool:
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= now


class Checkpoints:
    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def planned(
        self,
        run_id: str,
        kind: str,
        name: str | None,
        *,
        base_model: str,
        lora_config: dict[str, Any] | None,
        user_metadata: dict[str, str] | None,
        ttl_seconds: int | None,
    ) -> Checkpoint:
        """Describe a future checkpoint."""
        name = name or uuid4().hex
        if not _NAME.fullmatch(name):
            raise WireError(400, f"path: {name!r} must be letters, digits, '.', '_' and '-', without '/'")
        now = datetime.now(UTC)
        return Checkpoint(
            run_id=run_id,
            kind=kind,
            name=name,
            time=now.isoformat(),
            base_model=base_model,
            lora_config=lora_config,
            user_metadata=user_metadata,
            expires_at=_expiry(now, ttl_seconds),
        )

    def folder(self, checkpoint: Checkpoint) -> Path:
        return self._root / _folder_name(checkpoint.run_id) / checkpoint.kind / checkpoint.name

    def exists(self, checkpoint: Checkpoint) -> bool:
        return (self.folder(checkpoint) / NOTE).is_file()

    def notes(self, checkpoint: Checkpoint) -> dict[str, str]:
        return {NOTE: json.dumps(asdict(checkpoint), indent=2) + "\n"}

    def find(self, path: str, *, field: str = "path") -> Checkpoint:
        """Raises WireError 400 for a malformed path."""
        run_id, kind, name = _parts(path, field)
        found = _read_checkpoint(self._root / _folder_name(run_id) / kind / name / NOTE)
        if found is None or found.expired(datetime.now(UTC)):
            raise WireError(
                404, f"{field}: no checkpoint {path}; it was deleted, has expired, or was never saved"
            )
        return found

    def all(self, run_id: str | None = None) -> list[Checkpoint]:
        pattern = f"{_folder_name(run_id) if run_id else '*'}/*/*/{NOTE}"
        now = datetime.now(UTC)
        found = [_read_checkpoint(path) for path in self._root.glob(pattern)]
        kept = [checkpoint for checkpoint in found if checkpoint and not checkpoint.expired(now)]
        return sorted(kept, key=lambda checkpoint: checkpoint.time, reverse=True)

    def delete(self, checkpoint: Checkpoint) -> None:
        shutil.rmtree(self.folder(checkpoint))

    def delete_expired(self) -> None:
        now = datetime.now(UTC)
        for path in self._root.glob(f"*/*/*/{NOTE}"):
            found = _read_checkpoint(path)
            if found is not None and found.expired(now):
                shutil.rmtree(path.parent)

    def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> None:
        self._rewrite(replace(checkpoint, expires_at=_expiry(datetime.now(UTC), ttl_seconds)))

    def set_public(self, checkpoint: Checkpoint, *, public: bool) -> None:
        self._rewrite(replace(checkpoint, public=public))

    def _rewrite(self, checkpoint: Checkpoint) -> None:
        _write(self.folder(checkpoint) / NOTE, asdict(checkpoint))

    def as_reply(self, checkpoint: Checkpoint) -> dict[str, Any]:
        files = self.folder(checkpoint).iterdir()
        return {
            "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
            "checkpoint_type": ARCHIVE_KINDS[checkpoint.kind],
            "time": checkpoint.time,
            "tinker_path": checkpoint.path,
            "size_bytes": sum(file.stat().st_size for file in files),
            "public": checkpoint.public,
            "user_metadata": checkpoint.user_metadata,
            "expires_at": checkpoint.expires_at,
        }


def _read_checkpoint(path: Path) -> Checkpoint | None:
    # The file may be deleted at any time.
    try:
        return Checkpoint(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _parts(path: str, field: str) -> tuple[str, str, str]:
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3:
        raise WireError(400, f"{field}: {path!r} does not have the form tinker://RUN/weights/NAME")
    run_id, kind, name = parts
    if not _RUN.fullmatch(run_id) or kind not in ARCHIVE_KINDS or not _NAME.fullmatch(name):
        raise WireError(400, f"{field}: {path!r} has a malformed run, kind of weights or name")
    return run_id, kind, name


def _folder_name(run_id: str) -> str:
    return run_id.replace(":", "_")


def _expiry(now: datetime, ttl_seconds: int | None) -> str | None:
    if ttl_seconds is None:
        return None
    if not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise WireError(400, f"ttl_seconds: {ttl_seconds} is not between {MIN_TTL_S} and {MAX_TTL_S}")
    return (now + timedelta(seconds=ttl_seconds)).isoformat()


def _write(path: Path, value: object) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n", durable=True)
