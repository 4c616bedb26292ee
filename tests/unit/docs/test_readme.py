"""The README and the docs name what exists: code that compiles and imports, commands, targets.

Links are checked by `test_docs.py`.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinkerscript.cli import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = "clients.md"
"""Its code runs in tests/clients, where the libraries that it imports are installed."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_compiles_and_imports_what_exists(page: Path) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and page.name != RUN_ELSEWHERE:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_commands_shown_exist_with_their_options() -> None:
    shown = re.findall(r"tinkerscript (\w+)(.*)", "\n".join(blocks(ROOT / "README.md", "sh")))
    assert {command for command, _ in shown} >= {"train", "worker", "serve", "status"}
    for command, rest in shown:
        help_text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for option in re.findall(r"--[a-z-]+", rest.partition("#")[0]):
            assert option in help_text, f"tinkerscript {command} has no {option}"


def test_the_make_targets_shown_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    shown = re.findall(r"^make (\w+)", "\n".join(blocks(ROOT / "README.md", "sh")), flags=re.MULTILINE)
    assert shown
    for target in shown:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_readme_has_100_to_150_lines() -> None:
    assert 100 <= len((ROOT / "README.md").read_text().splitlines()) <= 150
