"""Writing files atomically, the identity that a run's files carry, and reading YAML that may be hostile.

Invariants: a reader finds a file's old content or its new one, whenever a process dies. Reading YAML takes
bounded time, runs no code, and gives plain data of bounded size or a ConfigError.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tinkerscript.errors import ConfigError


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file's content. `durable`: sync it to disk before returning."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:  # The disk may be full, and a draft would take what room is left.
        draft.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object, *, durable: bool = False) -> None:
    """Replace a JSON file's content atomically. `durable`: sync it to disk before returning."""
    write_atomically(path, json.dumps(value, indent=2) + "\n", durable=durable)


def sync(path: Path) -> None:
    """Return once a file's content, or what a folder lists, is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


RUN_ID = "run_id"
"""File in a run's folder with its identity, which its databases and checkpoints carry too."""

CONFIG_FILE = "config.yaml"
"""The config in a run's folder."""

LEDGER_FILE = "ledger.sqlite"
"""The ledger in a run's folder, unless it is in a database elsewhere."""

_STAMP_AT = 68
"""Where an SQLite file has its `application_id`, of 4 bytes."""


def stamp(database: sqlite3.Connection, path: Path) -> None:
    """Mark a database without a mark as one of the run in whose folder it is.

    Call it before the database has a write-ahead log, so that the mark is in the file itself.
    """
    with suppress(FileNotFoundError):
        run_id = (path.parent / RUN_ID).read_text(encoding="utf-8")
        if database.execute("PRAGMA application_id").fetchone() == (0,):
            database.execute(f"PRAGMA application_id = {_stamp_of(run_id)}")


def is_foreign(path: Path, run_id: str) -> bool:
    """Whether a database has the mark of another run than `run_id`. One without a mark does not."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(_STAMP_AT)
        return int.from_bytes(file.read(4)) not in (0, _stamp_of(run_id))
    return False


def _stamp_of(run_id: str) -> int:
    return 1 + int(run_id[:7], 16)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that a disk has no room."""
    causes = [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    return (
        (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
        or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        or os.strerror(errno.ENOSPC) in str(error)  # Of libraries that have no errno.
        or any(is_disk_full(cause) for cause in causes if cause is not None)
    )


def followed(path: Path) -> Path:
    """The folder that a link names, such as `runs/latest`, which may name another one later."""
    return Path(os.path.relpath(path.resolve())) if path.is_symlink() and path.exists() else path


def check_private(path: Path, status: os.stat_result, *, prefix: str = "") -> None:
    """Raises ConfigError, which begins with `prefix`, for a file that another user owns or can read."""
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{prefix}{path} must be owned by this user and readable by nobody else (chmod 600)"
        )


MAX_NODES = 100_000
"""Values in one text, at most; an alias counts each time it is used."""


def load_yaml(text: str, *, source: str) -> Any:
    """The text as plain data. Raises ConfigError with `source` and what is wrong."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _expanded_size(node, {}, source)
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deeply") from error
    # PyYAML's constructors do not catch what int(), date() and regular expressions raise for a bad value.
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def _expanded_size(node: yaml.Node, sizes: dict[int, int], source: str) -> int:
    """Nodes below `node`, following aliases. Takes time linear in the text, however large the result."""
    known = sizes.get(id(node))
    if known is not None:
        if not known:
            raise ConfigError(f"{source} is not valid YAML: an alias refers to what it is part of")
        return known
    sizes[id(node)] = 0  # Being counted: seeing it again below means that it contains itself.
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = list(node.value)
    elif isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    size = 1 + sum(_expanded_size(child, sizes, source) for child in children)
    if size > MAX_NODES:
        raise ConfigError(f"{source} stands for more than {MAX_NODES} values: its aliases multiply")
    sizes[id(node)] = size
    return size
