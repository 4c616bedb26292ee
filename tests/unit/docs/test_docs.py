"""The docs, checked without building the site: navigation, links, anchors, and quoted error messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkerscript.config import RunConfig

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The ids that Python-Markdown gives the page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in headings}


def in_navigation(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from in_navigation(each)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(listed) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def test_the_index_links_every_page() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if page.parent.name != "api"}
    assert pages - {"index.md"} <= set(links(DOCS / "index.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"
        assert page.name == "README.md" or target.is_relative_to(DOCS), f"{link} leaves the site"


def configs() -> Iterator[Any]:
    """Each YAML block of the docs, as a run's config."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for number, block in enumerate(blocks, 1):
            yield pytest.param(block, id=f"{page.relative_to(ROOT).as_posix()} {number}")


@pytest.mark.parametrize("block", configs())
def test_every_config_loads(block: str) -> None:
    assert RunConfig.model_validate(yaml.safe_load(block))


def test_the_pages_for_users_of_other_libraries_have_a_config_each() -> None:
    found = {str(each.id).partition(" ")[0] for each in configs()}
    assert {f"docs/{page.relative_to(DOCS).as_posix()}" for page in DOCS.glob("coming-from/*.md")} <= found


def literals() -> Iterator[str]:
    """Every string literal of the sources; what an f-string fills in is an ellipsis."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _shown(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "…"


def test_the_quoted_errors_are_messages_of_the_program() -> None:
    errors = (DOCS / "errors.md").read_text(encoding="utf-8").partition("## When a command starts")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", errors, flags=re.MULTILINE)
    assert len(quoted) > 20
    source = "\n".join(literals())
    for message in quoted:
        for part in re.split(r"\s*…\s*", message):
            assert part in source, f"no message says {part!r}, of: {message}"
