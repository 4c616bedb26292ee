"""`Checkpoints`: the folders behind `tinker://RUN/weights/NAME` and `tinker://RUN/sampler_weights/NAME`.

A checkpoint is a Hugging Face folder with one note of ours in it. The folders are the only record: what is
there after a restart is what there is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from tinkerscript.errors import WireError

NOTE = "tinker_checkpoint.json"


KINDS: Mapping[str, Literal["training", "sampler"]] = {"weights": "training", "sampler_weights": "sampler"}
"""Second part of a path -> Tinker's word for the kind."""


MIN_TTL_S, MAX_TTL_S = 3600, 10 * 366 * 24 * 3600


_RUN = re.compile(r"[A-Za-z0-9-]+:train:\d+")


_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of one checkpoint; times are ISO 8601 with a zone."""

    run_id: str
    kind: str
    """`weights` (with the optimizer's state) or `sampler_weights`."""

    name: str
    time: str
    base_model: str
    user_metadata: dict[str, str] | None = None
    expires_at: str | None = None
    public: bool = False

    @property
    def path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    def expired(self, now: datetime) -> bool:
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) <= now


class Checkpoints:
    """Everything under `root`, one folder a run."""

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
        user_metadata: dict[str, str] | None,
        ttl_seconds: int | None,
    ) -> Checkpoint:
        """A checkpoint that is to be written. Raises WireError naming the field."""
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
            user_metadata=user_metadata,
            expires_at=_expiry(now, ttl_seconds),
        )

    def folder(self, checkpoint: Checkpoint) -> Path:
        return self._root / _folder_name(checkpoint.run_id) / checkpoint.kind / checkpoint.name

    def exists(self, checkpoint: Checkpoint) -> bool:
        return (self.folder(checkpoint) / NOTE).is_file()

    def notes(self, checkpoint: Checkpoint) -> dict[str, str]:
        """The text files to write into the checkpoint's folder."""
        return {NOTE: json.dumps(asdict(checkpoint), indent=2) + "\n"}

    def find(self, path: str, *, field: str = "path") -> Checkpoint:
        """The checkpoint of a `tinker://` path. Raises WireError: 400 for no path, 404 if it is gone."""
        run_id, kind, name = _parts(path, field)
        found = _read(self._root / _folder_name(run_id) / kind / name / NOTE)
        if found is None or found.expired(datetime.now(UTC)):
            raise WireError(
                404, f"{field}: no checkpoint {path}; it was deleted, expired or never saved here"
            )
        return found

    def all(self, run_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of one run, or of all, newest first."""
        pattern = f"{_folder_name(run_id) if run_id else '*'}/*/*/{NOTE}"
        now = datetime.now(UTC)
        found = [_read(path) for path in self._root.glob(pattern)]
        kept = [checkpoint for checkpoint in found if checkpoint and not checkpoint.expired(now)]
        return sorted(kept, key=lambda checkpoint: checkpoint.time, reverse=True)

    def delete(self, checkpoint: Checkpoint) -> None:
        shutil.rmtree(self.folder(checkpoint))

    def delete_expired(self) -> None:
        now = datetime.now(UTC)
        for path in self._root.glob(f"*/*/*/{NOTE}"):
            found = _read(path)
            if found is not None and found.expired(now):
                shutil.rmtree(path.parent)

    def set_ttl(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> None:
        self._rewrite(replace(checkpoint, expires_at=_expiry(datetime.now(UTC), ttl_seconds)))

    def set_public(self, checkpoint: Checkpoint, *, public: bool) -> None:
        self._rewrite(replace(checkpoint, public=public))

    def _rewrite(self, checkpoint: Checkpoint) -> None:
        write_json(self.folder(checkpoint) / NOTE, asdict(checkpoint))

    def as_reply(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Tinker's `Checkpoint`."""
        files = self.folder(checkpoint).iterdir()
        return {
            "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
            "checkpoint_type": KINDS[checkpoint.kind],
            "time": checkpoint.time,
            "tinker_path": checkpoint.path,
            "size_bytes": sum(file.stat().st_size for file in files),
            "public": checkpoint.public,
            "user_metadata": checkpoint.user_metadata,
            "expires_at": checkpoint.expires_at,
        }


def _read(path: Path) -> Checkpoint | None:
    """None where there is no such file (any more)."""
    try:
        return Checkpoint(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _parts(path: str, field: str) -> tuple[str, str, str]:
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3:
        raise WireError(400, f"{field}: {path!r} is not of the form tinker://RUN/weights/NAME")
    run_id, kind, name = parts
    if not _RUN.fullmatch(run_id) or kind not in KINDS or not _NAME.fullmatch(name):
        raise WireError(400, f"{field}: {path!r} names no run, kind of weights or checkpoint of this server")
    return run_id, kind, name


def _folder_name(run_id: str) -> str:
    return run_id.replace(":", "_")


def _expiry(now: datetime, ttl_seconds: int | None) -> str | None:
    if ttl_seconds is None:
        return None
    if not MIN_TTL_S <= ttl_seconds <= MAX_TTL_S:
        raise WireError(400, f"ttl_seconds: {ttl_seconds} is not between {MIN_TTL_S} and {MAX_TTL_S}")
    return (now + timedelta(seconds=ttl_seconds)).isoformat()


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
