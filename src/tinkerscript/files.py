"""Write files atomically, mark databases with their run, and read untrusted YAML."""

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


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Replace a file's content, which readers see whole. `durable` waits until it is on disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:  # A draft would fill a full disk.
        draft.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object, *, durable: bool = False) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n", durable=durable)


def sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


RUN_ID = "run_id"
LATEST_RUN = "latest"
CONFIG_FILE = "config.yaml"
LEDGER_FILE = "ledger.sqlite"

# Of the 4-byte `application_id` in an SQLite file.
_STAMP_AT = 68


def stamp(database: sqlite3.Connection, path: Path) -> None:
    """Mark a new database with its folder's run, before it has a write-ahead log."""
    with suppress(FileNotFoundError):
        run_id = (path.parent / RUN_ID).read_text(encoding="utf-8")
        if database.execute("PRAGMA application_id").fetchone() == (0,):
            database.execute(f"PRAGMA application_id = {_stamp_of(run_id)}")


def is_foreign(path: Path, run_id: str) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(_STAMP_AT)
        return int.from_bytes(file.read(4)) not in (0, _stamp_of(run_id))
    return False


def _stamp_of(run_id: str) -> int:
    return 1 + int(run_id[:7], 16)


def is_disk_full(error: BaseException) -> bool:
    causes = [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
    return (
        (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
        or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        or os.strerror(errno.ENOSPC) in str(error)  # Some libraries raise errors without an errno.
        or any(is_disk_full(cause) for cause in causes if cause is not None)
    )


def resolve_link(path: Path) -> Path:
    return Path(os.path.relpath(path.resolve())) if path.is_symlink() and path.exists() else path


def check_private(path: Path, status: os.stat_result, *, prefix: str = "") -> None:
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"{prefix}{path} must be owned by this user and not readable by others (chmod 600)")


MAX_NODES = 100_000  # Aliases count at each use, against YAML bombs.


def load_yaml(text: str, *, source: str) -> Any:
    """Return plain data, in bounded time and size."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _expanded_size(node, {}, source)
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deeply") from error
    # PyYAML lets errors of int(), date() and regular expressions through.
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def _expanded_size(node: yaml.Node, sizes: dict[int, int], source: str) -> int:
    known = sizes.get(id(node))
    if known is not None:
        if not known:
            raise ConfigError(f"{source} is not valid YAML: an alias refers to a value that contains it")
        return known
    sizes[id(node)] = 0  # Meeting 0 again: the node contains itself.
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = list(node.value)
    elif isinstance(node, yaml.MappingNode):
        children = [part for pair in node.value for part in pair]
    size = 1 + sum(_expanded_size(child, sizes, source) for child in children)
    if size > MAX_NODES:
        raise ConfigError(f"{source} expands to more than {MAX_NODES} values through its aliases")
    sizes[id(node)] = size
    return size
