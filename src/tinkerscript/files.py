"""Writing files atomically, and reading YAML that may be hostile.

Invariants: a reader finds a file's old content or its new one, whenever a process dies. Reading YAML takes
bounded time, runs no code, and gives plain data of bounded size or a ConfigError.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from tinkerscript.errors import ConfigError


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file's content. `durable`: sync it to disk before returning."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file's content atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


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
