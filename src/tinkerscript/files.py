"""Files that readers find whole: the old content or the new, whenever a process dies.

YAML from people and from the network, read without being harmed by it.

Invariant: whatever the text is, reading it ends soon, runs nothing, and gives plain data of bounded size,
or a ConfigError.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from tinkerscript.errors import ConfigError


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file's content. `durable`: it is on the disk when this returns."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)


def check_private(path: Path, status: os.stat_result, *, prefix: str = "") -> None:
    """Raises ConfigError, which begins with `prefix`, for a file that another user owns or can read."""
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{prefix}{path} must be owned by this user and readable by nobody else (chmod 600)"
        )


MAX_NODES = 100_000
"""Values that a text may stand for, each alias counted as often as it is used."""


def load_yaml(text: str, *, source: str) -> Any:
    """The text as plain data. Raises ConfigError that names `source`, and what cannot be read."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _expanded_size(node, {}, source)
        return yaml.safe_load(text)
    except RecursionError as error:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deeply") from error
    # PyYAML's constructors let through what int(), date() and regular expressions raise for a bad value.
    except (yaml.YAMLError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error


def _expanded_size(node: yaml.Node, sizes: dict[int, int], source: str) -> int:
    """Nodes below `node`, aliases followed. Linear in the text, however large the result."""
    known = sizes.get(id(node))
    if known is not None:
        if not known:
            raise ConfigError(f"{source} is not valid YAML: an alias refers to what it is part of")
        return known
    sizes[id(node)] = 0  # Being counted: met again below, it holds itself.
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
