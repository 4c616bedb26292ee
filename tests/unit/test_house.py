"""`dev/house.py`: what it counts, and which problems it finds, in small trees."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import house
import source_tree
from source_tree import Module, Modules

MAIN = Path(house.__file__)


def tree(folder: Path, files: dict[str, str]) -> Modules:
    """Write files into `src/`, beside what is there."""
    for name, text in files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return source_tree.read_modules(folder / "src")


def test_code_lines_are_without_docstrings_comments_and_blank_lines() -> None:
    text = '''"""A module

with a long docstring."""

# A comment.
LIMIT = 3  # code
"""Of something."""

QUERY = """
SELECT 1

FROM t"""


def f(
    x: int,
) -> str:
    """Doc."""
    return "text"
'''
    assert Module("a", Path("p/a.py"), text).code_lines == 1 + 3 + 3 + 1


def test_imports_in_functions_for_type_checking_relative_and_by_literal_string_are_edges(
    tmp_path: Path,
) -> None:
    modules = tree(
        tmp_path,
        {
            "p/__init__.py": "",
            "p/a.py": "def f():\n    from p import b\n    import p.c.d as x\n",
            "p/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .c.d import D\n",
            "p/c/__init__.py": "from . import d\nfrom p import VERSION\n",
            "p/c/d.py": "import os, p.e\nclass D: ...\n",
            "p/e.py": 'import importlib\nimportlib.import_module("p.f")\nimportlib.import_module(f"p.{x}")\n',
            "p/f.py": "from p.f import itself\n",
        },
    )
    assert source_tree.import_graph(modules) == {
        "p": set(),
        "p.a": {"p.b", "p.c.d"},
        "p.b": {"p.c.d"},
        "p.c": {"p.c.d", "p"},
        "p.c.d": {"p.e"},
        "p.e": {"p.f"},
        "p.f": set(),
    }
    assert modules["p.e"].imports_by_string() == ["'p.f'", "f'p.{x}'"]


def test_every_cycle_of_files_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    found = source_tree.cycles(graph)
    assert sorted(sorted(set(each)) for each in found) == [["a", "b", "c"], ["d", "e"]]
    for cycle in found:
        assert cycle[0] == cycle[-1]
        assert all(other in graph[one] for one, other in pairwise(cycle))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAIN), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_only_cycles_and_homonyms_fail_the_check(tmp_path: Path) -> None:
    tree(tmp_path, {"p/a.py": "from typing import Protocol\nclass Seam(Protocol):\n    x: int\n"})
    done = run("--check", f"--root={tmp_path}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    tree(tmp_path, {"p/b.py": "import p.c\n", "p/c.py": "import p.b\nclass Seam: ...\n"})
    done = run("--check", f"--root={tmp_path}")
    assert done.returncode == 1
    assert "p.b -> p.c -> p.b" in done.stdout
    assert "Seam: p.a, p.c" in done.stdout
    assert "one importer" not in done.stdout
    as_json = json.loads(run("--json", f"--root={tmp_path}").stdout)
    assert as_json["counts"]["modules"] == 3
    assert as_json["problems"]["class homonyms"] == ["Seam: p.a, p.c"]


def test_keys_of_the_config_are_those_that_hold_a_value(tmp_path: Path) -> None:
    text = """
class Lora(Section):
    rank: int = 0
    seed: int = 0
class Task(Section):
    name: str = ""
    args: dict[str, str] = {}
class Weighted(Task):
    weight: float = 1.0
class RunConfig(Section):
    model_config = {}
    port: int | Literal["off"] = 0
    lora: Lora = Lora()
    task: Task = Task()
    tasks: list[Weighted] = []
    roles: dict[str, Role] = {}
    @property
    def all(self) -> list[Weighted]: ...
"""
    tree(
        tmp_path,
        {"p/a.py": text, "p/b.py": "class Role(Section):\n    kind: str\nclass Other:\n    x: int\n"},
    )
    assert house.survey(tmp_path / "src").counts["config keys"] == 1 + 2 + 2 + 1 + 1


def test_a_public_constant_is_defined_in_one_module(tmp_path: Path) -> None:
    types = 'from typing import TypeVar\nT = TypeVar("T")\n'
    modules = tree(
        tmp_path,
        {"p/a.py": f"{types}POLL_S = 1.0\n_OWN = 2\n", "q/b.py": f"{types}POLL_S: float = 2.0\n_OWN = 3\n"},
    )
    assert source_tree.constant_homonyms(modules) == {"POLL_S": ["p.a", "q.b"]}
