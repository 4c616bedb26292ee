"""`dev/mutants.toml` names files that exist, and lines that they have."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LISTED: dict[str, Any] = tomllib.loads((ROOT / "dev" / "mutants.toml").read_text())


def test_every_file_of_a_module_is_there() -> None:
    named = [file for module in LISTED["modules"].values() for file in (*module["files"], *module["tests"])]
    assert [file for file in named if not (ROOT / file).is_file()] == []


def test_every_line_that_may_be_mutated_unnoticed_is_there_with_a_reason() -> None:
    def text(file: str) -> str:
        return " ".join((ROOT / file).read_text(encoding="utf-8").split())

    stale = [each for each in LISTED["may_live"] if " ".join(each["line"].split()) not in text(each["file"])]
    assert stale == []
    assert all(each["reason"] for each in LISTED["may_live"])
