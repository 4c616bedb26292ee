"""The rooms: who may import whom, no cycles, nothing heavy where it must be light."""

from __future__ import annotations

import subprocess
import sys
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
    "tracing": "",
    "files": "errors",
    "remote_folder": "errors",
    "config": "errors files limits logs remote_folder",
    "model_folder": "errors remote_folder",
    "rollouts": "errors protocol",
    "inference_ctx": "errors rollouts",
    "asgi": "errors limits protocol",
    "gateway": "asgi config errors limits model_folder protocol rollouts tracing",
    "trainer_link": "errors files gateway limits protocol rollouts tracing",
    "server": (
        "asgi config errors files gateway http_server lifecycle limits logs model_folder protocol "
        "record rollouts tracing trainer_link"
    ),
    "client": "errors limits logs protocol tracing",
    "isolation": "errors",
    "workers": "client errors inspect_tinker_bridge isolation lifecycle logs protocol tracing",
    "engine": "config errors lifecycle model_folder",
    "http_server": "asgi config lifecycle limits",
    "tinker_api": "asgi config engine errors files http_server",
    "dashboard": "errors",
    "record": "errors files rollouts",
    "page": "asgi config errors gateway lifecycle model_folder record rollouts server",
    "processes": "config errors lifecycle logs protocol server trainer_link vllm_plugin",
    "train": (
        "config dashboard engine errors files gateway inspect_tinker_bridge lifecycle logs "
        "model_folder processes protocol record remote_folder rollouts server tracing trainer_link "
        "vllm_plugin workers"
    ),
    "vllm_plugin": "",
    "commands": (
        "client config dashboard engine errors files gateway http_server inspect_tinker_bridge "
        "lifecycle model_folder page processes protocol record remote_folder rollouts server "
        "tinker_api train trainer_link workers"
    ),
    "testing": "dashboard errors gateway rollouts server trainer_link",
    "cli": (
        "client commands dashboard engine errors files lifecycle logs model_folder page protocol "
        "record server tracing workers"
    ),
    "starter": "client",
    "__main__": "cli",
    "__init__": "",
    "inspect_tinker_bridge": "",
}
"""Room -> the other rooms of this repository that it may import."""

MODULES = source_tree.read_modules(SRC)
GRAPH = source_tree.import_graph(MODULES)
"""Module -> the modules of this repository that it imports, wherever in the file."""


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return (rest.partition(".")[0] or "__init__") if first == "tinkerscript" else first


def test_a_room_imports_only_rooms_below_it() -> None:
    for module, imported in GRAPH.items():
        room = room_of(module)
        rooms = {room_of(name) for name in imported} - {room, "__init__"}
        assert rooms <= {*ALLOWED[room].split()}, f"{module} imports {rooms - {*ALLOWED[room].split()}}"
    assert {room_of(module) for module in GRAPH} == set(ALLOWED)


def test_there_are_no_import_cycles() -> None:
    assert source_tree.cycles(GRAPH) == []


@pytest.mark.parametrize(
    "package",
    ["tinkerscript.client", "tinkerscript.server", "tinkerscript.workers"],  # the server has the gateway
)
def test_light_packages_load_nothing_heavy(package: str) -> None:
    packages = (package, "tinkerscript.gateway") if package == "tinkerscript.server" else (package,)
    modules = [
        name for name in GRAPH if any(name == each or name.startswith(f"{each}.") for each in packages)
    ]
    if package == "tinkerscript.workers":
        modules = ["tinkerscript.workers.worker"]  # its Inspect module is for those who have Inspect
    modules = [name for name in modules if not name.endswith("__main__")]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
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
