"""Mirror a run's folder at a URL.

A run with `experiment_dir: s3://...` works in a local folder. At each checkpoint and the end, a thread copies
everything new with fsspec and deletes checkpoints that are gone here. The next copy, or `--resume`, repeats a
failed one.

A checkpoint is complete there once it has a `manifest.json`, with sizes and digests. The ledger goes first,
so it covers every checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from tinkerscript.errors import ConfigError, UploadError
from tinkerscript.files import CONFIG_FILE, LEDGER_FILE, RUN_ID, write_atomically

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
ROLES = "roles"

# A run needs them to resume.
BEGUN = (CONFIG_FILE, RUN_ID, "sft_data.json")

METRICS_FILE = "metrics.jsonl"
SUMMARIES = (METRICS_FILE, "summary.json", "alignment.json", "learning_curve.png")
FOLDERS = ("rollouts", "inspect")  # Their files never change.

Position = tuple[int, int]  # A ledger's number of trainer starts and steps.
NOWHERE: Position = (0, 0)
POSITION = "position.json"  # At the URL.

ATTEMPTS = 5  # The run then continues without the copy.
UPLOAD_PAUSE_S = 1.0  # Doubled after each attempt.
UPLOAD_STOP_S = 30.0  # How long a stopped or failed run waits.

_URL = re.compile(r"(?!tinker:)[a-z][a-z0-9+.-]*://.+")
_STEP = re.compile(r"step_(\d+)")


def is_url(text: str) -> bool:
    """`tinker://` names a service's weights."""
    return _URL.fullmatch(text) is not None


def name_of(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


class RemoteFolder:
    """Methods block and raise OSError or other file system errors."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            import fsspec  # noqa: PLC0415 - An extra.
        except ImportError as error:
            raise ConfigError(f"{url} needs fsspec; run pip install 'tinkerscript[remote]'") from error
        try:
            found: Any = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be opened: {error}") from error
        self._files, self._root = found

    def read(self, name: str) -> bytes:
        return self._files.cat_file(self._at(name))

    def write(self, data: bytes, name: str) -> None:
        target = self._at(name)
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(target, data)

    def put(self, path: Path, name: str) -> None:
        self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), self._at(name))

    def get(self, name: str, path: Path) -> None:
        self._files.get_file(self._at(name), str(path))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Return the sorted entries with sizes in bytes."""
        with suppress(FileNotFoundError):
            found = self._files.ls(self._at(folder), detail=True)
            return {name_of(each["name"]): each["size"] for each in sorted(found, key=lambda e: e["name"])}
        return {}

    def names(self, folder: str) -> list[str]:
        return list(self.sizes(folder))

    def manifest(self, checkpoint: str) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            return json.loads(self.read(f"{checkpoint}/{MANIFEST}".lstrip("/")))
        return {}

    def steps(self, folder: str = CHECKPOINTS) -> list[int]:
        steps = sorted(int(match[1]) for match in map(_STEP.fullmatch, self.names(folder)) if match)
        return [step for step in steps if self.manifest(f"{folder}/step_{step:04d}")]

    def put_checkpoint(self, source: Path, name: str) -> None:
        """Upload the manifest last, replacing any former checkpoint."""
        self.remove(name)
        sealed = source / MANIFEST
        manifest: dict[str, Any] = json.loads(sealed.read_bytes()) if sealed.exists() else {}
        files = sorted(path for path in source.rglob("*") if path.is_file() and path != sealed)
        manifest["files"] = {str(path.relative_to(source)): _description(path) for path in files}
        targets = [self._at(f"{name}/{file}") for file in manifest["files"]]
        for parent in {target.rpartition("/")[0] for target in targets}:
            self._files.makedirs(parent, exist_ok=True)
        self._files.put([str(path) for path in files], targets)
        self.write(json.dumps(manifest, indent=2).encode(), f"{name}/{MANIFEST}")

    def get_checkpoint(self, name: str, target: Path) -> None:
        """Download to a new folder. Raises ConfigError if the checkpoint is incomplete."""
        where = f"{self.url}/{name}".rstrip("/")
        manifest = self.manifest(name)
        if not manifest:
            raise ConfigError(f"{where} is not a finished checkpoint: it has no {MANIFEST}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as folder:
            draft = Path(folder, target.name)
            draft.mkdir()
            (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            for file in manifest["files"]:
                path = PurePosixPath(file)
                if path.is_absolute() or ".." in path.parts or not path.parts:
                    raise ConfigError(f"{MANIFEST} names {file!r}, which is not a file of the checkpoint")
            copies = [draft / file for file in manifest["files"]]
            for copy in copies:
                copy.parent.mkdir(parents=True, exist_ok=True)
            self._files.get(
                [f"{self._at(name)}/{file}" for file in manifest["files"]], list(map(str, copies))
            )
            for copy, (file, wanted) in zip(copies, manifest["files"].items(), strict=True):
                if _description(copy) != wanted:
                    raise ConfigError(f"{where}: {file} differs from its entry in {MANIFEST}")
            draft.rename(target)

    def remove(self, name: str) -> None:
        path = self._at(name)
        if self._files.exists(f"{path}/{MANIFEST}"):
            self._files.rm_file(f"{path}/{MANIFEST}")
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def position(self) -> Position:
        with suppress(FileNotFoundError):
            resumptions, steps = json.loads(self.read(POSITION))
            return resumptions, steps
        return NOWHERE


def _description(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


class Uploads:
    """Copies a run in a thread, as an async context manager.

    `finish` waits for all copies. Without it, the exit waits up to `UPLOAD_STOP_S`.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        note: Callable[[str], None],
        *,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`note` receives copy errors."""
        self.remote = RemoteFolder(url)
        self._folder, self._note, self._pause = folder, note, pause
        self._wanted, self._is_last = threading.Event(), False
        self._ended: Future[None] = Future()
        self._error = ""

    async def __aenter__(self) -> Uploads:
        """Raises ConfigError for a URL that is not writable or has another run."""
        await asyncio.to_thread(self._begin)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="uploads", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._ended.done():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end(), UPLOAD_STOP_S)
        if self._error or not self._ended.done():
            self._note(f"the copy at {self.remote.url} is incomplete; --resume copies the rest")

    async def finish(self) -> None:
        """Wait for all copies. Raises UploadError."""
        await self._end()
        if self._error:
            raise UploadError(
                f"not copied to {self.remote.url}: {self._error}; the run is complete in {self._folder}, and "
                "--resume copies the rest"
            )

    async def _end(self) -> None:
        self._is_last = True
        self._wanted.set()
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def copy(self) -> None:
        self._wanted.set()

    def _begin(self) -> None:
        try:
            if self.remote.position() > position_of(self._folder / LEDGER_FILE):
                raise ConfigError(
                    f"experiment_dir: {self.remote.url} already holds a run; resume it "
                    f"(tinkerscript train --resume {self.remote.url}), or name another folder"
                )
            self._copy_files(BEGUN)
        except ConfigError:
            raise
        except Exception as error:  # fsspec's file systems raise many kinds.
            raise ConfigError(
                f"experiment_dir: {self.remote.url} cannot be written: {_error_text(error)}"
            ) from error

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        is_last = False
        while not is_last:
            self._wanted.wait()
            self._wanted.clear()
            is_last = self._is_last
            for attempt in range(ATTEMPTS):
                self._pause(UPLOAD_PAUSE_S * 2 ** (attempt - 1) if attempt else 0)
                try:
                    self._copy_all(is_last=is_last)
                    self._error = ""
                    break
                except Exception as error:  # noqa: BLE001 - File systems of fsspec raise many kinds of errors.
                    self._error = _error_text(error)
            if self._error and not is_last:
                text = f"the copy at {self.remote.url} is incomplete: {self._error}"
                with suppress(RuntimeError):  # The run has ended and closed its loop.
                    loop.call_soon_threadsafe(self._note, text)
        self._ended.set_result(None)

    def _copy_all(self, *, is_last: bool) -> None:
        # The ledger, copied next, covers them. Roles come first, because the policy's checkpoint completes a
        # step.
        local = [path.parent for path in (self._folder / CHECKPOINTS).rglob(MANIFEST)]
        checkpoints = sorted(local, key=lambda path: (-len(path.parts), path.name))
        self._copy_ledger()
        self._copy_files(SUMMARIES)
        for folder in FOLDERS:
            there, here = self.remote.sizes(folder), sorted((self._folder / folder).glob("*"))
            self._copy_files(f"{folder}/{p.name}" for p in here if there.get(p.name) != p.stat().st_size)
        for path in checkpoints:
            if is_last or _STEP.fullmatch(path.name):  # The run may still replace the final checkpoint.
                self._copy_checkpoint(path)
        for folder in {CHECKPOINTS, *(str(path.parent.relative_to(self._folder)) for path in checkpoints)}:
            for name in filter(_STEP.fullmatch, self.remote.names(folder)):
                if self._folder / folder / name not in checkpoints:
                    self.remote.remove(f"{folder}/{name}")

    def _copy_files(self, names: Iterable[str]) -> None:
        for name in names:
            if (path := self._folder / name).is_file():
                self.remote.write(path.read_bytes(), name)

    def _copy_checkpoint(self, path: Path) -> None:
        name = str(path.relative_to(self._folder))
        try:
            if not self._is_there(path, name):
                self.remote.put_checkpoint(path, name)
        except FileNotFoundError:
            if path.exists():
                raise

    def _is_there(self, path: Path, name: str) -> bool:
        # A final checkpoint there may be from an earlier end.
        there = self.remote.manifest(name) if _STEP.fullmatch(path.name) else {}
        there["files"] = {file: {"bytes": each["bytes"]} for file, each in there.get("files", {}).items()}
        return there == json.loads((path / MANIFEST).read_bytes())

    def _copy_ledger(self) -> None:
        ledger = self._folder / LEDGER_FILE
        if not ledger.exists():
            return
        with tempfile.TemporaryDirectory(prefix=".copy-", dir=self._folder) as place:
            copy = Path(place) / LEDGER_FILE
            # Only SQLite copies consistently while the run writes.
            with closing(sqlite3.connect(ledger)) as run:
                run.execute("VACUUM INTO ?", (str(copy),))
            self.remote.put(copy, LEDGER_FILE)
            self.remote.write(json.dumps(position_of(copy)).encode(), POSITION)


def position_of(ledger: Path) -> Position:
    if not ledger.exists():
        return NOWHERE
    query = "SELECT (SELECT count(*) FROM resumptions), (SELECT count(*) FROM steps)"
    with closing(sqlite3.connect(ledger)) as run:
        has_tables = run.execute("SELECT 1 FROM sqlite_schema WHERE name = 'resumptions'").fetchone()
        return run.execute(query).fetchone() if has_tables else NOWHERE


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def fetched_checkpoint(url: str, *, note: Callable[[str], None] = lambda text: None) -> Path:
    """Return a cached copy, fetched again if changed. Raises ConfigError for an incomplete checkpoint."""
    remote = RemoteFolder(url)
    try:
        content = json.dumps(remote.manifest("")).encode()
        digest = hashlib.sha256(remote.url.encode() + b"\n" + content).hexdigest()[:32]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = cache / "tinkerscript" / CHECKPOINTS / digest / name_of(remote.url)
        if not folder.is_dir():
            note(f"fetching {remote.url}")
            remote.get_checkpoint("", folder)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{url} cannot be read: {_error_text(error)}") from error
    return folder


def local_checkpoint(name: str, *, note: Callable[[str], None] = lambda text: None) -> str:
    return str(fetched_checkpoint(name, note=note)) if is_url(name) else name


def resumable_folder(url: str, runs: Path, *, note: Callable[[str], None] = lambda text: None) -> Path:
    """Return a folder in `runs` with the run at a URL.

    Raises ConfigError if there is no run, or it was continued elsewhere.
    """
    remote, folder = RemoteFolder(url), runs / name_of(url)
    try:
        there, here = remote.position(), position_of(folder / LEDGER_FILE)
        is_here = (folder / CONFIG_FILE).exists()
        if there == NOWHERE and not is_here and not remote.steps():
            raise ConfigError(f"--resume: {url} contains no run")
        if is_here and there > here:
            raise ConfigError(
                f"--resume: the run at {url} was continued elsewhere (it has {there[0]} starts and "
                f"{there[1]} steps there, {here[0]} and {here[1]} in {folder}); move {folder} away to resume "
                "from the URL"
            )
        if not is_here:
            note(f"fetching the run at {url} into {folder}")
            _fetch_run(remote, folder)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--resume: {url} cannot be read: {_error_text(error)}") from error
    return folder


def _fetch_run(remote: RemoteFolder, folder: Path) -> None:
    # The run id comes last, because it marks a complete download.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (*BEGUN[1:], METRICS_FILE):
        with suppress(FileNotFoundError):
            (folder / name).write_bytes(remote.read(name))
    # Fetch all steps: a copy deletes what is missing here.
    roles = [f"{CHECKPOINTS}/{ROLES}/{role}" for role in remote.names(f"{CHECKPOINTS}/{ROLES}")]
    for step in remote.steps():
        for name in (f"{each}/step_{step:04d}" for each in (CHECKPOINTS, *roles)):
            if not (folder / name).exists() and remote.manifest(name):
                remote.get_checkpoint(name, folder / name)
    if remote.position() > NOWHERE:
        draft = folder / f".{LEDGER_FILE}"
        remote.get(LEDGER_FILE, draft)
        draft.rename(folder / LEDGER_FILE)
    write_atomically(folder / CONFIG_FILE, remote.read(CONFIG_FILE).decode())
