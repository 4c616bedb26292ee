"""The tools in `dev/`: what `house.py` counts and finds, `install.py`, and the list of mutants."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import house
import install
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


def test_imports_in_functions_for_types_relative_and_by_literal_string_are_edges(tmp_path: Path) -> None:
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


def test_a_public_constant_is_defined_in_one_module(tmp_path: Path) -> None:
    types = 'from typing import TypeVar\nT = TypeVar("T")\n'
    modules = tree(
        tmp_path,
        {"p/a.py": f"{types}POLL_S = 1.0\n_OWN = 2\n", "q/b.py": f"{types}POLL_S: float = 2.0\n_OWN = 3\n"},
    )
    assert source_tree.constant_homonyms(modules) == {"POLL_S": ["p.a", "q.b"]}


# `install.py`: uv does what pip would do with its settings, or pip does it


LISTED = """\
:env:.extra-index-url='https://env/simple'
:env:.disable-pip-version-check='1'
global.cert='/etc/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='\\n/wheels'
install.index-url='https://mirror/simple?a=b'
download.index-url='https://other/simple'
"""


def test_the_settings_of_pip_become_those_of_uv() -> None:
    made = install.for_uv(install.settings(LISTED))
    assert made is not None
    options, variables = made
    assert options[options.index("--default-index") + 1] == "https://mirror/simple?a=b"
    assert options.count("--index") == 1
    assert options[options.index("--index") + 1] == "https://env/simple", "the environment goes first"
    assert options[options.index("--find-links") + 1] == "/wheels"
    assert options[options.index("--constraint") + 1] == "/etc/constraints.txt"
    assert variables == {"SSL_CERT_FILE": "/etc/ca.crt"}


def test_a_setting_without_a_counterpart_is_left_to_pip() -> None:
    assert install.for_uv({"client-cert": "me.pem"}) is None


# The list of mutants


ROOT = Path(__file__).parents[2]


def test_what_the_list_of_mutants_names_is_there() -> None:
    listed = tomllib.loads((ROOT / "dev" / "mutants.toml").read_text())
    for module in listed["modules"].values():
        assert [file for file in (*module["files"], *module["tests"]) if not (ROOT / file).is_file()] == []
    for each in listed["may_live"]:
        text = (ROOT / each["file"]).read_text(encoding="utf-8")
        assert " ".join(each["line"].split()) in " ".join(text.split()), each["line"]
        assert each["reason"]
