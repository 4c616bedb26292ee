"""The public modules: each has an exact `__all__`, and docs/api/index.md names them all."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEAMS = [
    "tinkerscript.engine.losses",
    "tinkerscript.gateway.dialects",
    "tinkerscript.gateway.dialects.dialect",
    "tinkerscript.sampler",
    "tinkerscript.gateway.claim_book",
    "tinkerscript.train.backends",
    "tinkerscript.train.backends.backend",
    "tinkerscript.train.step_metrics",
    "tinkerscript.workers.base_task",
]
BRIDGE = [
    f"inspect_tinker_bridge.{name}"
    for name in ("env", "dataset", "loader", "tasks", "ground_truth", "sandbox", "scoring")
]
PUBLIC = [
    "tinkerscript",
    "tinkerscript.client",
    "tinkerscript.config",
    "tinkerscript.errors",
    "tinkerscript.inference_ctx",
    "tinkerscript.protocol",
    "tinkerscript.rollouts",
    "tinkerscript.testing",
    "inspect_tinker_bridge",
    *BRIDGE,
    *SEAMS,
]


def exported(module: str) -> list[str]:
    names = import_module(module).__all__
    assert len(names) == len(set(names)), module
    return list(names)


def source_of(module: str) -> Path:
    path = ROOT / "src" / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def defined_in(module: str) -> set[str]:
    """Public classes and functions that a file defines."""
    names: set[str] = set()
    for node in ast.parse(source_of(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_of_all_is_there(module: str) -> None:
    missing = [name for name in exported(module) if not hasattr(import_module(module), name)]
    assert not missing


@pytest.mark.parametrize("module", [module for module in PUBLIC if module not in SEAMS])
def test_what_a_public_module_defines_is_in_all_or_private(module: str) -> None:
    assert defined_in(module) <= set(exported(module)), sorted(defined_in(module) - set(exported(module)))


def test_the_api_page_names_the_public_modules() -> None:
    page = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    unnamed = [module for module in PUBLIC if module not in page and module not in BRIDGE]
    assert unnamed == []
