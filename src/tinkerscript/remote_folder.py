"""A run's folder at a URL: what the run writes once is copied there, and read from there.

A run with `experiment_dir: s3://...` works in a folder of this machine. What is finished in it (a checkpoint,
the rollouts of a step, an Inspect log) is put into the folder's `outbox`, and a thread copies it to the URL
in that order, through fsspec, and what the journal has had since. The layout there is the run folder's, but
for two things: a checkpoint has a `manifest.json`, and the journal is in pieces, `journal/FIRST-END.jsonl`,
named by the bytes that they hold.

Invariants: what has its name at the URL is whole, since a file is moved to its name and a checkpoint's
manifest is written last; what is in the outbox stays there until it is copied, whatever dies; and a run waits
for its copies only at its end.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import queue
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from tinkerscript.errors import ConfigError, UploadError

OUTBOX = "outbox"
"""In the run's folder: what is still to be copied."""

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
ROLES = "roles"
"""Below it: the checkpoints of roles that train, in a folder for each."""

JOURNAL = "journal.jsonl"
BEGUN = ("config.yaml", "sft_data.json")
"""What a run is resumed with, besides its journal and a checkpoint."""

METRICS = "metrics.jsonl"
FETCHED = "fetched_journal"
"""In a run's folder that was fetched from a URL: how many bytes of its journal were."""


ATTEMPTS = 5
"""How often a copy is tried before the run goes on to the next one. Each is tried again at the run's end."""

PAUSE_S = 1.0
"""Seconds before the second attempt, and twice as long before each further one."""

STOP_S = 30.0
"""Seconds that a run which is stopped, or has failed, waits for its copies. `--resume` copies the rest."""

_URL = re.compile(r"(?!tinker:)[a-z][a-z0-9+.-]*://.+")
_PIECE = re.compile(r"(\d{15})-(\d{15})\.jsonl")
_STEP = re.compile(r"step_(\d+)")


def is_url(text: str) -> bool:
    """Whether this names a folder at a URL. `tinker://` is where a service of that protocol has weights."""
    return _URL.fullmatch(text) is not None


def name_of(url: str) -> str:
    """The last part of a URL: the name of the folder on this machine that stands for it."""
    return url.rstrip("/").rpartition("/")[2]


class RemoteFolder:
    """A folder at a URL. Every method blocks, and raises OSError, or what else its file system raises."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError without fsspec, or for a protocol that it does not know."""
        self.url = url.rstrip("/")
        try:
            import fsspec  # noqa: PLC0415 - An extra.
        except ImportError as error:
            raise ConfigError(f"{url} needs fsspec: pip install 'tinkerscript[remote]'") from error
        try:
            found: Any = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be opened: {error}") from error
        self._files, self._root = found

    def read(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""
        return self._files.cat_file(self._at(name))

    def has(self, name: str) -> bool:
        return self._files.exists(self._at(name))

    def names(self, folder: str) -> list[str]:
        """The names of what is in a folder, sorted; none if there is no such folder."""
        with suppress(FileNotFoundError):
            return sorted(name_of(path) for path in self._files.ls(self._at(folder), detail=False))
        return []

    def put(self, source: Path, name: str) -> None:
        """Copy a file; it has its name once it is whole."""
        target = self._at(name)
        draft = f"{target}.partial"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(source), draft)
        self._files.mv(draft, target)

    def put_checkpoint(self, source: Path, name: str) -> None:
        """Copy a checkpoint's folder, its manifest last. One of that name is replaced."""
        paths = sorted(path for path in source.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(source)): _description(path) for path in paths}
        self.remove(name)
        for path in paths:
            target = self._at(f"{name}/{path.relative_to(source)}")
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), target)
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder, MANIFEST)
            draft.write_text(json.dumps({"files": manifest}, indent=2) + "\n", encoding="utf-8")
            self.put(draft, f"{name}/{MANIFEST}")

    def get_checkpoint(self, name: str, target: Path) -> None:
        """Copy a checkpoint to `target`, which must not exist. Raises ConfigError if it is not whole."""
        try:
            manifest = json.loads(self.read(f"{name}/{MANIFEST}" if name else MANIFEST))["files"]
        except FileNotFoundError:
            where = f"{self.url}/{name}".rstrip("/")
            raise ConfigError(f"{where} is no finished checkpoint: it has no {MANIFEST}") from None
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            for file, wanted in manifest.items():
                copy = draft / _checked(file)
                copy.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(self._at(f"{name}/{file}" if name else file), str(copy))
                if _description(copy) != wanted:
                    raise ConfigError(f"{self.url}/{name}: {file} is not what its {MANIFEST} says")
            draft.rename(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # It is there only if something went wrong.

    def remove(self, name: str) -> None:
        """Remove a checkpoint, its manifest first."""
        path = self._at(name)
        if self._files.exists(f"{path}/{MANIFEST}"):
            self._files.rm_file(f"{path}/{MANIFEST}")
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def pieces(self) -> list[tuple[int, int, str]]:
        """First byte, end and name of the journal's pieces that follow one another from its beginning."""
        return _following(self.names("journal"))

    def steps(self, folder: str = CHECKPOINTS) -> list[int]:
        """The steps with a whole checkpoint in `folder`, in order."""
        named = [_STEP.fullmatch(name) for name in self.names(folder)]
        steps = sorted(int(match[1]) for match in named if match)
        return [step for step in steps if self.has(f"{folder}/step_{step:04d}/{MANIFEST}")]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _following(names: Iterable[str]) -> list[tuple[int, int, str]]:
    found: list[tuple[int, int, str]] = []
    end = 0
    for name in sorted(names):
        match = _PIECE.fullmatch(name)
        if match and int(match[1]) == end:
            end = int(match[2])
            found.append((int(match[1]), end, name))
    return found


def _description(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _checked(name: str) -> str:
    """A name below a folder. Raises ConfigError for one that leads out of it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ConfigError(f"{MANIFEST} names {name!r}, which is no file of the checkpoint")
    return name


class Uploads:
    """Copies what a run has finished, in a thread of its own. Use as an async context manager.

    `finish` waits for everything; without it, after an error, the end of the block waits for `STOP_S`.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        note: Callable[[str], None],
        *,
        keep_checkpoints: int,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`folder`: the run's. `note` is told what could not be copied. Raises ConfigError for a bad URL."""
        self.remote = RemoteFolder(url)
        self._folder, self._outbox = folder, folder / OUTBOX
        self._note, self._keep, self._pause = note, keep_checkpoints, pause
        self._waiting: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._failed: dict[Path, str] = {}
        """What was tried `ATTEMPTS` times, and why that failed."""

        self._ended: Future[None] = Future()
        self._number = 0
        self._copied = 0
        """Bytes of the journal that are at the URL."""

    async def __aenter__(self) -> Uploads:
        """Raises ConfigError if the URL cannot be written, or a new run's URL holds another one."""
        await asyncio.to_thread(self._begin)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="outbox", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._ended.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._end(), STOP_S)
            if left := self.left():
                self._note(f"not copied to {self.remote.url} yet: {_some(left)}; --resume copies them")

    async def finish(self) -> None:
        """Wait until all of it is copied. Raises UploadError with what could not be."""
        await self._end()
        if left := self.left():
            reason = next(reversed(self._failed.values()))
            raise UploadError(
                f"not copied to {self.remote.url}: {_some(left)} ({reason}); the run is whole in "
                f"{self._folder}, and --resume copies the rest"
            )

    async def _end(self) -> None:
        self.add_journal()
        self._waiting.put(None)
        await asyncio.shield(asyncio.wrap_future(self._ended))

    def left(self) -> list[str]:
        """The names of what is not copied yet."""
        behind = self._copied < _size(self._folder / JOURNAL)
        return [*map(_name_in, self._entries()), *([JOURNAL] if behind else [])]

    def add(self, path: Path) -> None:
        """Copy this file or checkpoint of the run's folder, which is not changed where it is any more."""
        entry = self._outbox / f"{self._number:08d}"
        draft = self._outbox / f".{entry.name}"
        shutil.rmtree(draft, ignore_errors=True)
        _link_below(path, draft / path.relative_to(self._folder))
        draft.rename(entry)
        self._number += 1
        self._waiting.put(entry)

    def add_journal(self) -> None:
        """Copy what the journal and the metrics have when it is their turn."""
        self._waiting.put(self._folder / JOURNAL)

    def _begin(self) -> None:
        try:
            pieces = self.remote.pieces()
            self._copied = pieces[-1][1] if pieces else 0
            if pieces and not _size(self._folder / JOURNAL):
                raise ConfigError(
                    f"experiment_dir: {self.remote.url} already holds a run; resume it "
                    f"(tinkerscript train --resume {self.remote.url}), or name another folder"
                )
            for name in BEGUN:
                if (self._folder / name).exists():
                    self.remote.put(self._folder / name, name)
        except ConfigError:
            raise
        except Exception as error:  # File systems have errors of their own.
            raise ConfigError(
                f"experiment_dir: {self.remote.url} cannot be written: {_said(error)}"
            ) from error
        entries = self._entries()
        self._number = 1 + max((int(entry.name) for entry in entries), default=0)
        for entry in entries:
            self._waiting.put(entry)

    def _entries(self) -> list[Path]:
        """What is in the outbox, in the order in which it is copied."""
        found = self._outbox.iterdir() if self._outbox.is_dir() else ()
        return sorted(path for path in found if path.name.isdecimal())

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while (entry := self._waiting.get()) is not None:
            if not self._is_copied(entry, attempts=ATTEMPTS):
                text = f"{_name_in(entry)} is not copied to {self.remote.url}: {self._failed[entry]}"
                with suppress(RuntimeError):  # The run has ended meanwhile.
                    loop.call_soon_threadsafe(self._note, text)
        for entry in list(self._failed):
            self._is_copied(entry, attempts=1)
        self._ended.set_result(None)

    def _is_copied(self, entry: Path, *, attempts: int) -> bool:
        for attempt in range(1, attempts + 1):
            try:
                self._copy(entry)
            except Exception as error:  # noqa: BLE001 - File systems have errors of their own; it is told.
                self._failed[entry] = _said(error)
            else:
                self._failed.pop(entry, None)
                return True
            if attempt < attempts:
                self._pause(PAUSE_S * 2 ** (attempt - 1))
        return False

    def _copy(self, entry: Path) -> None:
        if entry.name == JOURNAL:
            self._copy_journal(entry)
            return
        name = _name_in(entry)
        if (entry / name).is_dir():
            self.remote.put_checkpoint(entry / name, name)
            folder = name.rpartition("/")[0]
            # A role's are copied before the policy's, whose newest one there may still be the one before.
            keep = self._keep + (folder != CHECKPOINTS)
            for step in self.remote.steps(folder)[:-keep]:
                self.remote.remove(f"{folder}/step_{step:04d}")
        else:
            self.remote.put(entry / name, name)
        shutil.rmtree(entry)

    def _copy_journal(self, path: Path) -> None:
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            file.seek(self._copied)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            end = self._copied + len(whole)
            self.remote.put(self._written(whole), f"journal/{self._copied:015d}-{end:015d}.jsonl")
            self._copied = end
        if (metrics := self._folder / METRICS).exists():
            self.remote.put(self._written(metrics.read_bytes()), METRICS)

    def _written(self, data: bytes) -> Path:
        self._outbox.mkdir(exist_ok=True)
        draft = self._outbox / ".appended"
        draft.write_bytes(data)
        return draft


def _name_in(entry: Path) -> str:
    """The name, in the run's folder, of the one file or checkpoint that an entry of the outbox has."""
    if entry.name == JOURNAL:
        return JOURNAL
    folders = (f"{CHECKPOINTS}/{ROLES}/*/*", f"{CHECKPOINTS}/*")
    checkpoints = (path for folder in folders for path in entry.glob(folder))
    files = (path for path in entry.rglob("*") if path.is_file())
    return str(next(checkpoints, None) or next(files)).removeprefix(f"{entry}/")


def _link_below(source: Path, target: Path) -> None:
    """Copy a file or folder by hard links: the run may delete its own meanwhile."""
    target.parent.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link)
    else:
        _link(str(source), str(target))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # The file system has no links.
        shutil.copyfile(source, target)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def fetched_checkpoint(url: str, *, note: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a checkpoint at a URL, in this user's cache: fetched again if another one has its name.

    Raises ConfigError for one that is not there, not whole, or cannot be read.
    """
    remote = RemoteFolder(url)
    try:
        content = remote.read(MANIFEST)
        digest = hashlib.sha256(remote.url.encode() + b"\n" + content).hexdigest()[:32]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = cache / "tinkerscript" / CHECKPOINTS / digest / name_of(remote.url)
        if not folder.is_dir():
            note(f"fetching {remote.url}")
            remote.get_checkpoint("", folder)
    except FileNotFoundError:
        raise ConfigError(f"{url} is no finished checkpoint: it has no {MANIFEST}") from None
    except ConfigError:
        raise
    except Exception as error:  # File systems have errors of their own.
        raise ConfigError(f"{url} cannot be read: {_said(error)}") from error
    return folder


def local_checkpoint(name: str, *, note: Callable[[str], None] = lambda text: None) -> str:
    """The folder of a checkpoint at a URL; any other name as it is. Raises ConfigError."""
    return str(fetched_checkpoint(name, note=note)) if is_url(name) else name


def resumable_folder(url: str, runs: Path, *, note: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of the run at a URL, to resume it here: the one in `runs` that is copied there, or one with
    what is needed of it.

    Raises ConfigError for a URL without a run, or if the run has gone on elsewhere.
    """
    remote, folder = RemoteFolder(url), runs / name_of(url)
    try:
        pieces, size = remote.pieces(), _size(folder / JOURNAL)
        if not pieces and not size:
            raise ConfigError(f"--resume: {url} holds no run yet (no journal)")
        if size and pieces and pieces[-1][1] > size:
            raise ConfigError(
                f"--resume: the run at {url} has gone on elsewhere ({pieces[-1][1]} bytes of its journal are "
                f"there, {size} in {folder}): move {folder} away to resume what is there"
            )
        if not size:
            note(f"fetching the run at {url} into {folder}")
            _fetch_run(remote, pieces, folder)
    except ConfigError:
        raise
    except Exception as error:  # File systems have errors of their own.
        raise ConfigError(f"--resume: {url} cannot be read: {_said(error)}") from error
    return folder


def _fetch_run(remote: RemoteFolder, pieces: list[tuple[int, int, str]], folder: Path) -> None:
    """The journal comes last: with it the folder holds a run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*BEGUN, METRICS):
        with suppress(FileNotFoundError):
            (folder / name).write_bytes(remote.read(name))
    for step in remote.steps()[-1:]:
        roles = [f"{CHECKPOINTS}/{ROLES}/{role}" for role in remote.names(f"{CHECKPOINTS}/{ROLES}")]
        for name in (f"{each}/step_{step:04d}" for each in (CHECKPOINTS, *roles)):
            if not (folder / name).exists():
                remote.get_checkpoint(name, folder / name)
    size = pieces[-1][1] if pieces else 0
    (folder / FETCHED).write_text(str(size), encoding="utf-8")
    draft = folder / f".{JOURNAL}"
    with draft.open("wb") as file:
        for _, _, name in pieces:
            file.write(remote.read(f"journal/{name}"))
    draft.rename(folder / JOURNAL)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
