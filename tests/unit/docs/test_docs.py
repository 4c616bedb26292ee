"""The docs, checked without building the site: links, what they name, and what scripts write into them."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tinkerscript.cli import app
from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.config.server_section import ClientConfig, InterchangeConfig
from tinkerscript.limits import BOUNDS, SECTION, Bound

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = {page.relative_to(ROOT).as_posix(): page for page in (README, *sorted(DOCS.rglob("*.md")))}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL)


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


# Pages and links


def test_every_page_is_in_the_navigation_once_and_linked_from_the_index() -> None:
    navigation = text_of("mkdocs.yml").partition("\nnav:")[2]
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(re.findall(r"[\w/-]+\.md", navigation)) == sorted(pages)
    assert {page for page in pages if page[:4] != "api/"} - {"index.md"} <= {*links(DOCS / "index.md")}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"
        assert page == README or target.is_relative_to(DOCS), f"{link} leaves the site"


@pytest.mark.parametrize(
    ("script", "function", "target"),
    [
        ("clients_table", "render", "docs/clients.md"),
        ("draw_token_buffer", "render", "docs/token_buffer.svg"),
        ("write_config_docs", "render", "docs/config.md"),
        ("write_families", "page", "docs/models.md"),
    ],
)
def test_what_a_script_writes_is_current(script: str, function: str, target: str) -> None:
    written = runpy.run_path(str(ROOT / f"scripts/{script}.py"))[function]()
    assert text_of(target) == written, f"run scripts/{script}.py"


# Code, configs, commands


@pytest.mark.parametrize("page", PAGES)
def test_code_compiles_and_imports_what_exists(page: str) -> None:
    """That of docs/clients.md runs in tests/clients, where the libraries that it imports are installed."""
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module and page != "docs/clients.md":
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


CONFIGS = {f"{page} {n}": block for page in PAGES for n, block in enumerate(blocks(page, "yaml"), 1)}


@pytest.mark.parametrize("block", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_config_loads(block: str) -> None:
    assert RunConfig.model_validate(yaml.safe_load(block))


def test_the_pages_for_users_of_other_libraries_have_a_config_each() -> None:
    assert {page for page in PAGES if "coming-from/" in page} <= {name.split()[0] for name in CONFIGS}


def test_the_readmes_commands_exist_with_their_options() -> None:
    shown = "\n".join(blocks("README.md", "sh"))
    commands = re.findall(r"tinkerscript (\w+)(.*)", shown)
    assert {command for command, _ in commands} >= {"train", "worker", "serve", "status"}
    for command, rest in commands:
        help_text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        for option in re.findall(r"--[a-z-]+", rest.partition("#")[0]):
            assert option in help_text, f"tinkerscript {command} has no {option}"
    targets = set(re.findall(r"^make (\w+)", shown, flags=re.MULTILINE))
    assert targets
    assert targets <= {*re.findall(r"^(\w+):", text_of("Makefile"), flags=re.MULTILINE)}


def test_the_readme_has_100_to_150_lines() -> None:
    assert 100 <= len(text_of("README.md").splitlines()) <= 150


# Names of settings, messages and tests


def test_the_choices_of_training_are_settings() -> None:
    table = text_of("docs/training.md").partition("## Where the choices come from")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)
    named = {key for cell in cells for key in re.findall(r"`([\w.]+)`", cell)}
    assert {"group_size", "replay_uses", "loss_mean"} <= named <= TrainingConfig.model_fields.keys()


def literals() -> Iterator[str]:
    """Every string literal of the sources; what an f-string fills in is an ellipsis."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_quoted_errors_are_messages_of_the_program() -> None:
    errors = text_of("docs/errors.md").partition("## When a command starts")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", errors, flags=re.MULTILINE)
    assert len(quoted) > 20
    source = "\n".join(literals())
    for message in quoted:
        for part in re.split(r"\s*…\s*", message):
            assert part in source, f"no message says {part!r}, of: {message}"


def defined_tests(path: str) -> list[str]:
    return re.findall(r"^(?:async )?def (test_\w+)\(", text_of(path), re.MULTILINE)


@pytest.mark.parametrize(
    ("place", "file"), enumerate(("test_token_failure_modes.py", "test_reply_failure_modes.py"))
)
def test_the_table_of_failure_modes_names_every_test(place: int, file: str) -> None:
    page = text_of("docs/tokens.md").partition("## The failure modes")[2]
    table = page.split("| what goes wrong |")[1:][place]
    assert re.findall(r"`(test_\w+)` \|$", table, re.MULTILINE) == defined_tests(f"tests/unit/gateway/{file}")


def test_every_claim_about_security_names_a_test_that_is_there() -> None:
    parts = text_of("docs/security.md").split("## What holds")
    parties, claims = (re.findall(r"^\| (.*) \|$", part, re.MULTILINE)[1:] for part in parts)
    assert len(claims) > 30
    for claim in claims:
        subject, other, what, test = claim.split(" | ")
        path, _, name = test.strip("`").partition("::")
        assert {subject, other} <= {party.split(" | ")[0] for party in parties}, what
        assert name in defined_tests(path), test


# The limits


UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}


def default_of(bound: Bound) -> int:
    """The default of the setting that says the limit."""
    model = RunConfig
    if bound.name.startswith(SECTION):
        model = ClientConfig if ".clients." in bound.name else InterchangeConfig
    return int(model.model_fields[bound.name.rpartition(".")[2]].default)


def amount(bound: Bound) -> str:
    limit = bound.limit or default_of(bound)
    if bound.unit.startswith("bytes"):
        size, unit = next(each for each in UNITS.items() if limit % each[0] == 0)
        shown = f"{limit // size} {unit}{bound.unit.removeprefix('bytes')}"
    elif limit > 2**30 and limit & (limit + 1) == 0:
        shown = f"2^{limit.bit_length()} - 1 {bound.unit}"
    elif limit > 2**30 and limit == 10 ** (digits := len(str(limit)) - 1):
        shown = f"10^{digits} {bound.unit}"
    else:
        shown = f"{limit:,} {bound.unit}"
    return shown if bound.limit else f"{shown} by default"


def test_the_table_is_that_of_the_bounds() -> None:
    section = text_of("docs/protocol.md").partition("## Limits\n")[2].partition("\n## ")[0]
    found, scope = list[tuple[str, str, str]](), ""
    for first, names, most in re.findall(r"^\|(.*?)\| (`.*) \| (.*) \|$", section, re.MULTILINE):
        scope = first.strip() or scope
        found += [(name, scope, most) for name in re.findall("`(.+?)`", names)]
    known = [(each.name, f"{each.scope} ({each.status})", amount(each)) for each in BOUNDS.values()]
    assert sorted(found) == sorted(known)
