"""docs/tokens.md names every failure-mode test, each in its file, and its figure is what the code draws."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = ("test_token_failure_modes.py", "test_reply_failure_modes.py")


def names_in(path: Path) -> list[str]:
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [name for name in functions if name.startswith("test_")]


@pytest.mark.parametrize(("place", "file"), enumerate(FILES))
def test_the_table_names_every_test(place: int, file: str) -> None:
    page = (ROOT / "docs" / "tokens.md").read_text(encoding="utf-8")
    tables = page.partition("## The failure modes")[2].split("| what goes wrong |")[1:]
    assert re.findall(r"`(test_\w+)` \|$", tables[place], re.MULTILINE) == names_in(
        ROOT / "tests/unit/gateway" / file
    )


def test_the_figure_is_current() -> None:
    script = ROOT / "scripts" / "draw_token_buffer.py"
    drawn = runpy.run_path(str(script))["render"]()
    assert (ROOT / "docs" / "token_buffer.svg").read_text(encoding="utf-8") == drawn, (
        "run scripts/draw_token_buffer.py"
    )
