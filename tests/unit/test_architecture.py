"""The rooms: who may import whom, no cycles, nothing heavy where it must be light, and what is public."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from inspect import isclass, isfunction
from itertools import accumulate
from pathlib import Path

import pytest

import source_tree

SRC = Path(__file__).parents[2] / "src"

ALLOWED = {
    "errors": "",
    "limits": "errors",
    "protocol": "errors limits",
    "lifecycle": "",
    "logs": "limits",
    "files": "errors",
    "remote_folder": "errors files",
    "config": "errors files limits logs remote_folder",
    "gguf_file": "errors",
    "model_folder": "errors gguf_file remote_folder",
    "rollouts": "errors",
    "inference_ctx": "errors rollouts",
    "asgi": "errors limits protocol",
    "client": "errors limits logs protocol",
    "isolation": "errors",
    "engine": "config errors lifecycle model_folder",
    "http_server": "asgi config lifecycle limits",
    "tinker_api": "asgi config engine errors files http_server",
    "dashboard": "",
    "vllm_plugin": "",
    "starter": "client",
    "__init__": "",
    "inspect_tinker_bridge": "",
    "workers": "client errors inspect_tinker_bridge isolation lifecycle protocol",
    "access_tokens": "asgi config errors files logs",
    "sampler": "errors rollouts",
    "ledger": "errors files rollouts",
    "trainer_link": "errors files ledger limits protocol rollouts sampler",
    "addresses": "config errors trainer_link",
    "tokenizer": "errors model_folder rollouts",
    "gateway": "asgi config errors limits model_folder protocol rollouts sampler tokenizer",
    "server": (
        "access_tokens addresses asgi config errors files gateway http_server ledger lifecycle limits logs "
        "model_folder protocol rollouts sampler trainer_link"
    ),
    "processes": (
        "access_tokens addresses asgi client config errors ledger lifecycle logs protocol server "
        "trainer_link vllm_plugin workers"
    ),
    "page": "addresses asgi config dashboard errors files ledger lifecycle model_folder rollouts tokenizer",
    "train": (
        "access_tokens addresses config dashboard engine errors files gateway inspect_tinker_bridge "
        "ledger lifecycle logs model_folder processes protocol remote_folder rollouts sampler "
        "tokenizer trainer_link vllm_plugin workers"
    ),
    "commands": (
        "access_tokens addresses asgi client config dashboard engine errors files http_server "
        "inspect_tinker_bridge ledger lifecycle model_folder page processes protocol remote_folder "
        "tinker_api train trainer_link workers"
    ),
    "testing": "dashboard errors gateway rollouts sampler",
    "cli": (
        "client commands dashboard engine errors files ledger lifecycle logs model_folder page protocol "
        "server workers"
    ),
    "__main__": "cli",
}
"""Room -> the other rooms of this repository that it may import."""


@cache
def modules() -> source_tree.Modules:
    return source_tree.read_modules(SRC)


@cache
def graph() -> dict[str, set[str]]:
    """Module -> the modules of this repository that it imports, wherever in the file."""
    return source_tree.import_graph(modules())


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return (rest.partition(".")[0] or "__init__") if first == "tinkerscript" else first


def test_a_room_imports_only_rooms_below_it() -> None:
    for module, imported in graph().items():
        room = room_of(module)
        rooms = {room_of(name) for name in imported} - {room, "__init__"}
        assert rooms <= {*ALLOWED[room].split()}, f"{module} imports {rooms - {*ALLOWED[room].split()}}"
    assert {room_of(module) for module in graph()} == set(ALLOWED)


def test_there_are_no_import_cycles() -> None:
    assert source_tree.cycles(graph()) == []


def loaded_by(modules: Iterable[str]) -> set[str]:
    """What another process has imported after these modules."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


HEAVY = "torch transformers inspect_ai tinker tinker_cookbook"


@pytest.mark.parametrize(
    ("packages", "heavy"),
    [
        ("client", f"{HEAVY} fastapi zmq msgspec numpy typer openai yaml"),
        ("server gateway", HEAVY),
        ("workers.worker", HEAVY),  # Its Inspect module is for those who have Inspect.
        ("inference_ctx rollouts.parquet rollouts.trainers", f"{HEAVY} pyarrow datasets pydantic"),
        ("commands.train", "torch inspect_ai"),  # What the user can put right is refused before.
    ],
)
def test_light_packages_load_nothing_heavy(packages: str, heavy: str) -> None:
    roots = [f"tinkerscript.{package}" for package in packages.split()]
    chosen = [name for name in graph() if any(f"{name}.".startswith(f"{root}.") for root in roots)]
    loaded = loaded_by(name for name in chosen if not name.endswith("__main__"))
    assert not {*heavy.split()} & loaded


def imported_at_once(module: str) -> Iterator[str]:
    """Yield what the statements at a module's margin import, with the packages that it is in."""
    for node in modules()[module].tree.body:
        names = list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield from accumulate(name.split("."), "{}.{}".format)


def test_a_trainer_imports_what_only_some_need_when_it_is_used() -> None:
    """Each takes up to a second of a core."""
    needed = ("commands.train", "train.run", "train.sft", "engine.embedded", "engine.memory")
    left, seen = {f"tinkerscript.{module}" for module in needed}, set[str]()
    while left:
        seen.add(module := left.pop())
        names = set(imported_at_once(module))
        assert not {"inspect_ai", "inspect_tinker_bridge", "matplotlib", "peft"} & names, module
        left |= (names & modules().keys()) - seen
    assert "tinkerscript.train.step_log" in seen


# The public modules


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


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_exact(name: str) -> None:
    """Every name of `__all__` is there, once, and what a module defines is in it or private."""
    module = import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [each for each in module.__all__ if not hasattr(module, each)] == []
    if name not in SEAMS:
        defined = {
            key
            for key, value in vars(module).items()
            if (isclass(value) or isfunction(value)) and value.__module__ == name and key[0] != "_"
        }
        assert defined <= {*module.__all__}


def test_the_api_page_names_the_public_modules() -> None:
    page = (ROOT / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    assert [module for module in PUBLIC if module not in page and module not in BRIDGE] == []
