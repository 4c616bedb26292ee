"""The rooms: who may import whom, no cycles, nothing heavy where it must be light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"

ALLOWED = {
    "errors": set(),
    "limits": {"errors"},
    "protocol": {"errors", "limits"},
    "lifecycle": set(),
    "logs": {"limits"},
    "tracing": set(),
    "files": {"errors"},
    "remote_folder": {"errors"},
    "config": {"errors", "limits", "files", "logs", "remote_folder"},
    "model_folder": {"errors", "remote_folder"},
    "rollouts": {"errors", "protocol"},
    "inference_ctx": {"errors", "rollouts"},
    "asgi": {"errors", "limits", "protocol"},
    "gateway": {"errors", "limits", "protocol", "config", "model_folder", "rollouts", "asgi", "tracing"},
    "trainer_link": {"errors", "limits", "tracing", "files", "protocol", "rollouts", "gateway"},
    "server": {
        *(
            "errors",
            "limits",
            "files",
            "protocol",
            "config",
            "model_folder",
            "rollouts",
            "gateway",
            "trainer_link",
            "asgi",
            "http_server",
            "lifecycle",
            "logs",
            "record",
            "tracing",
        ),
    },
    "client": {"errors", "limits", "logs", "tracing", "protocol"},
    "isolation": {"errors"},
    "workers": {
        *("isolation", "errors", "logs", "tracing", "protocol", "lifecycle", "client"),
        "inspect_tinker_bridge",
    },
    "engine": {"errors", "lifecycle", "config", "model_folder"},
    "http_server": {"asgi", "config", "lifecycle", "limits"},
    "tinker_api": {"asgi", "config", "errors", "files", "engine", "http_server"},
    "dashboard": {"errors"},
    "record": {"errors", "files", "rollouts"},
    "page": {
        *("asgi", "config", "errors", "lifecycle", "gateway", "model_folder", "record", "rollouts", "server"),
    },
    "processes": {"errors", "lifecycle", "logs", "config", "trainer_link", "server", "vllm_plugin"},
    "train": {
        *(
            "errors",
            "files",
            "protocol",
            "config",
            "model_folder",
            "remote_folder",
            "rollouts",
            "gateway",
            "trainer_link",
            "server",
        ),
        *(
            "logs",
            "tracing",
            "engine",
            "dashboard",
            "processes",
            "inspect_tinker_bridge",
            "lifecycle",
            "vllm_plugin",
            "record",
            "workers",
        ),
    },
    "vllm_plugin": set(),
    "commands": {
        *(
            "errors",
            "files",
            "lifecycle",
            "config",
            "model_folder",
            "remote_folder",
            "gateway",
            "server",
            "trainer_link",
            "engine",
            "tinker_api",
            "dashboard",
            "rollouts",
        ),
        *("processes", "train", "client", "protocol", "inspect_tinker_bridge", "page", "record"),
        *("http_server", "workers"),
    },
    "testing": {"dashboard", "errors", "gateway", "rollouts", "server", "trainer_link"},
    "cli": {
        *("errors", "logs", "tracing", "protocol", "lifecycle", "client", "workers", "server", "commands"),
        *("dashboard", "engine", "files", "model_folder", "page", "record"),
    },
    "starter": {"client"},
    "__main__": {"cli"},
    "__init__": set(),
    "inspect_tinker_bridge": set(),
}
"""Room -> the other rooms of this repository that it may import."""


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return (rest.partition(".")[0] or "__init__") if first == "tinkerscript" else first


MODULES = {module_name(path) for path in SRC.rglob("*.py")}


def imports_of(path: Path) -> set[str]:
    """Modules of this repository that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module or "" for name in names}
    ours = ("tinkerscript", "inspect_tinker_bridge")
    return {name for name in found if name.partition(".")[0] in ours}


FILES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


@pytest.mark.parametrize("module", FILES)
def test_a_room_imports_only_rooms_below_it(module: str) -> None:
    room = room_of(module)
    rooms = {room_of(name) for name in imports_of(FILES[module]) if name in FILES} - {room, "__init__"}
    assert rooms <= ALLOWED[room], f"{module} imports {sorted(rooms - ALLOWED[room])}"


def test_there_are_no_import_cycles() -> None:
    graph = {module: {name for name in imports_of(path) if name in FILES} for module, path in FILES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in sorted(graph[module] - {module}):
                visit(other, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_rooms_in_the_table_exist() -> None:
    assert {room_of(module) for module in FILES} == set(ALLOWED)


@pytest.mark.parametrize(
    "package",
    ["tinkerscript.client", "tinkerscript.server", "tinkerscript.workers"],  # the server has the gateway
)
def test_light_packages_load_nothing_heavy(package: str) -> None:
    packages = (package, "tinkerscript.gateway") if package == "tinkerscript.server" else (package,)
    modules = [
        name for name in FILES if any(name == each or name.startswith(f"{each}.") for each in packages)
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
