"""Checks that the files in a run's folder are complete and belong to one run.

A checkpoint is complete if its files match manifest.json, which is written last. Databases and checkpoints
carry their run's identity.
"""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

from tinkerscript.config import RUNS
from tinkerscript.errors import ConfigError
from tinkerscript.files import LATEST_RUN, LEDGER_FILE, RUN_ID, is_foreign, sync, write_atomically, write_json
from tinkerscript.ledger.history import LAST_STEP, check_covers
from tinkerscript.remote_folder import CHECKPOINTS, MANIFEST


def check_unused(path: Path) -> None:
    try:
        if holds_run(path):
            raise ConfigError(
                f"experiment_dir: {path} already holds a run; resume it (tinkerscript train --resume "
                f"{shlex.quote(str(path))}), name another folder, or use 'auto'"
            )
        if path.is_dir() and any(path.iterdir()) and not (path / RUN_ID).exists():
            raise ConfigError(
                f"experiment_dir: {path} is not empty and holds no run: name a new folder, or use 'auto'"
            )
        place = path
        while not place.exists():
            place = place.parent
        Path(tempfile.mkdtemp(prefix=".tinkerscript-", dir=place)).rmdir()
        check_whole(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"experiment_dir: no run can be written to {str(path)!r} ({reason}): name another folder with "
            "--set experiment_dir=..."
        ) from error


def check_whole(path: Path) -> None:
    """Refuse damaged files, or files of several runs."""
    run_id = _read(path / RUN_ID)
    if not run_id and holds_run(path):
        raise ConfigError(f"{path} has no {RUN_ID}, which identifies the run of {LEDGER_FILE}: put it back")
    if not run_id:
        return
    checkpoints = {folder: _manifest(folder) for folder in sorted(path.glob(f"{CHECKPOINTS}/step_*"))}
    marked = {folder: manifest for folder, manifest in checkpoints.items() if manifest}
    foreign = [path / LEDGER_FILE] if is_foreign(path / LEDGER_FILE, run_id) else []
    foreign += [folder for folder, manifest in marked.items() if manifest["run"] != run_id]
    if foreign:
        raise ConfigError(
            f"{_listed(foreign)} in {path}: from another run than the rest of the folder; put this "
            "run's own back, or start a new run in a new folder"
        )
    if marked and all(map(damage_of, checkpoints)):
        newest = max(checkpoints)
        raise ConfigError(
            f"no checkpoint in {path} is complete ({newest.name} has {damage_of(newest)}): put one back, or "
            f"remove {path / CHECKPOINTS} to begin again at step 1"
        )
    if (path / LEDGER_FILE).exists():
        whole = [int(folder.name.removeprefix("step_")) for folder in checkpoints if not damage_of(folder)]
        check_covers(_asked(path / LEDGER_FILE, LAST_STEP.replace("{s}", "")), whole)


def holds_run(path: Path) -> bool:
    """Whether a run has begun here."""
    ledger = path / LEDGER_FILE
    if not ledger.exists():
        return any(path.glob(f"{CHECKPOINTS}/step_*")) or size_of(path / "metrics.jsonl") > 0
    return bool(_asked(ledger, "SELECT EXISTS (SELECT 1 FROM episodes) OR EXISTS (SELECT 1 FROM steps)"))


def _asked(ledger: Path, query: str) -> int:
    try:
        with closing(sqlite3.connect(ledger)) as run:
            has_tables = run.execute("SELECT 1 FROM sqlite_schema WHERE name = 'steps'").fetchone()
            return run.execute(query).fetchone()[0] if has_tables else 0
    except sqlite3.Error as error:
        raise ConfigError(f"{ledger} cannot be read ({error}): put a whole ledger back") from error


def identify(path: Path) -> str:
    run_id = _read(path / RUN_ID) or uuid4().hex
    write_atomically(path / RUN_ID, run_id, durable=True)
    return run_id


def write_manifest(checkpoint: Path, run_id: str) -> None:
    """Mark a checkpoint as complete. Blocks until it is on disk."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.name != MANIFEST)
    # After a power failure, the size can be right without the content.
    for path in paths:
        sync(path)
    files = [path for path in paths if path.is_file()]
    sizes = {str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size} for path in files}
    write_json(checkpoint / MANIFEST, {"run": run_id, "files": sizes}, durable=True)
    for folder in (checkpoint, checkpoint.parent):
        sync(folder)


def damage_of(checkpoint: Path) -> str:
    manifest = _manifest(checkpoint)
    if not manifest:
        return f"no {MANIFEST}"
    for name, wanted in manifest["files"].items():
        if (size := size_of(checkpoint / name)) != wanted["bytes"]:
            return f"{size} of the {wanted['bytes']} bytes of {name}"
    return ""


def _manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


def link_as_latest(run: Path) -> None:
    """Point `runs/latest` at this run, unless it is a real folder."""
    link = RUNS / LATEST_RUN
    if link.is_dir() and not link.is_symlink():
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    draft = RUNS / f".latest-{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(run, RUNS), target_is_directory=True)
    draft.replace(link)
