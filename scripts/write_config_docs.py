"""Writes docs/config.md from the field docstrings of the config models. Run it after changing one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tinkerscript.commands.key_texts import default_text, section_of, type_text
from tinkerscript.config import RunConfig, TaskConfig, WeightedTaskConfig

TARGET = Path(__file__).parent.parent / "docs" / "config.md"

INTRODUCTION = """\
# Config

One YAML file describes a run: `tinkerscript train CONFIG`. Unknown keys are refused. Any key can be set on
the command line, as in `--set training.steps=10`. `examples/arithmetic.yaml` is the demo's config.

Paths of tasks, scripts, data, models and checkpoints start from the config's folder, or from the working
directory if they are given on the command line. Runs are written to `runs/` in the working directory.

`tinkerscript config` prints this reference in a terminal; `tinkerscript config training.kl` prints the keys
that begin so. `scripts/write_config_docs.py` generates this page from `src/tinkerscript/config/`.
"""


def render() -> str:
    return "\n".join([INTRODUCTION, "## Top level\n", _table(RunConfig), *_sections(RunConfig, "")])


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section:
            description = (field.description or "").replace("\n", " ")
            yield from (f"## `{prefix}{name}`\n", f"{description}\n", _table(section))
            yield from _sections(section, f"{prefix}{name}.")


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    inherited = TaskConfig.model_fields if model is WeightedTaskConfig else {}
    for name, field in model.model_fields.items():
        if section_of(field.annotation) or name in inherited:
            continue
        meaning = (field.description or "").replace("\n", " ")
        rows.append(f"| `{name}` | {_default(field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    """The default, with the type or the other choices unless the default shows them."""
    default, kinds = default_text(field), type_text(field.annotation).split(" or ")
    others = ", ".join(each for each in kinds if each not in (default, "null"))
    if field.annotation is bool:
        return default
    if default == "required" or len(kinds) == 1:
        return f"{default} ({others})" if default in ("empty", "required") else default
    return f"{default} (or {others})"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"wrote {TARGET}\n")
