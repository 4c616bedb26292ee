"""Writes docs/config.md from the field docstrings of the config models. Run it after changing them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tinkerscript.config import RunConfig

TARGET = Path(__file__).parent.parent / "docs" / "config.md"

INTRODUCTION = """\
# Config

One YAML file describes a run: `tinkerscript train CONFIG`. Unknown keys are refused by name. Any key can also
be set on the command line: `--set training.steps=10`. `examples/arithmetic.yaml` is the demo's config.

Files that a config reads (tasks, scripts, data, models, checkpoints) are relative to the config's folder,
those on the command line to the working directory. What a run writes goes to `runs/` in the working
directory.

`scripts/write_config_docs.py` generates this page from `src/tinkerscript/config/`.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, "## Top level\n", _table(RunConfig), *_sections(RunConfig, "")])


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The sections of `model`, each with its own sections after it."""
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section:
            description = (field.description or "").replace("\n", " ")
            yield from (f"## `{prefix}{name}`\n", f"{description}\n", _table(section))
            yield from _sections(section, f"{prefix}{name}.")


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if _section(field.annotation):
            continue
        meaning = (field.description or "").replace("\n", " ")
        rows.append(f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _section(annotation: object) -> type[BaseModel] | None:
    """The model of a section, or of each entry of a list of them or of a mapping from names to them."""
    if get_origin(annotation) in (list, dict):
        annotation = get_args(annotation)[-1]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _type(annotation: object) -> str:
    if get_args(annotation) and all(isinstance(value, str) for value in get_args(annotation)):
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(each) for each in get_args(annotation))
    if _section(annotation):
        return "list of sections"
    if get_origin(annotation) is list:
        return f"list of {_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _default(field: object) -> str:
    default = getattr(field, "default", PydanticUndefined)
    if default is PydanticUndefined:
        factory = getattr(field, "default_factory", None)
        return (f"`{factory()}`" if factory() else "empty") if factory else "required"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`" if default != "" else "empty"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"wrote {TARGET}\n")
