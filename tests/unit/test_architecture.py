"""The rooms: who may import whom, no cycles, nothing heavy where it must be light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
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


@pytest.mark.parametrize(
    "package",
    ["tinkerscript.client", "tinkerscript.server", "tinkerscript.workers"],  # the server has the gateway
)
def test_light_packages_load_nothing_heavy(package: str) -> None:
    packages = (package, "tinkerscript.gateway") if package == "tinkerscript.server" else (package,)
    chosen = [
        name for name in graph() if any(name == each or name.startswith(f"{each}.") for each in packages)
    ]
    if package == "tinkerscript.workers":
        chosen = ["tinkerscript.workers.worker"]  # its Inspect module is for those who have Inspect
    chosen = [name for name in chosen if not name.endswith("__main__")]
    code = f"import sys, {', '.join(chosen)}; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    heavy = {"torch", "transformers", "inspect_ai", "tinker", "tinker_cookbook"} & loaded
    assert not heavy, f"{package} loads {sorted(heavy)}"
    if package == "tinkerscript.client":
        assert not {"fastapi", "zmq", "msgspec", "numpy", "typer", "openai", "yaml"} & loaded


def test_the_rooms_of_rollouts_need_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import tinkerscript.inference_ctx, tinkerscript.rollouts.parquet, tinkerscript.rollouts.trainers\n"
        "print({'torch', 'tinker', 'transformers', 'pyarrow', 'datasets', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


WHEN_USED = {"inspect_ai", "inspect_tinker_bridge", "matplotlib", "peft"}
"""What some trainers never need, and takes them up to a second of a core each."""


def imported_at_once(module: str) -> Iterator[str]:
    """Yield what importing `module` imports. Functions and what is for type checking do not count."""
    left: list[ast.AST] = [modules()[module].tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)


def test_a_trainer_imports_what_only_some_need_when_it_is_used() -> None:
    left = ["tinkerscript.commands.train", "tinkerscript.train.run", "tinkerscript.train.sft"]
    left += ["tinkerscript.engine.embedded", "tinkerscript.engine.memory"]
    seen = set[str]()
    while left:
        module = left.pop()
        seen.add(module)
        names = set(imported_at_once(module))
        heavy = {name for name in names if name.partition(".")[0] in WHEN_USED}
        assert not heavy, f"{module} imports {sorted(heavy)} before it is used"
        # Importing `a.b.c` imports `a.b` too.
        parts = (name.split(".") for name in names)
        found = {".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}
        left += (found & modules().keys()) - seen
    assert "tinkerscript.train.step_log" in seen
