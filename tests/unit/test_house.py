"""`dev/house.py`: what it counts, and which problems it finds, in small trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import episode_trace
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


def test_shipped_fakes_are_modules_and_no_code_lines(tmp_path: Path) -> None:
    tree(tmp_path, {"p/testing.py": "X = 1\n", "p/a.py": "X = 1\nY = 2\n"})
    counts = house.survey(tmp_path / "src").counts
    assert (counts["modules"], counts["lines"], counts["code lines"]) == (2, 3, 2)


def test_lengths_have_median_p90_and_the_longest_by_name(tmp_path: Path) -> None:
    files = {f"p/m{n}.py": "X = 1\n" * n for n in range(1, 11)}
    tree(tmp_path, {**files, "p/f.py": "class A:\n    def f(self):\n        return 1\ndef f(): ...\n"})
    counts = house.survey(tmp_path / "src").counts
    assert counts["module length"] == "median 5, p90 9, max 10 (p.m10)"
    assert counts["function length"] == "median 2, p90 2, max 2 (p.f.f, line 2)"


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


def test_folders_may_form_a_cycle_where_their_files_do_not(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "p/one/a.py": "import p.two.a\n",
            "p/one/b.py": "",
            "p/two/a.py": "",
            "p/two/b.py": "import p.one.b\n",
            "p/deep/x/a.py": "import p.deep.helper\n",
            "p/deep/helper.py": "import p.deep.x.b\n",
            "p/deep/x/b.py": "",
        },
    )
    graph = source_tree.import_graph(modules)
    assert source_tree.cycles(graph) == []
    folders = source_tree.folder_cycles(modules, graph)
    by_folder = dict(each.rstrip(")").replace(" (", ": ").split(": ", 1) for each in folders)
    assert list(by_folder) == ["p", "p/deep"]
    path, reasons = by_folder["p"].split(": ")
    assert set(path.split(" -> ")) == {"one/", "two/"}
    assert set(reasons.split(", ")) == {"p.one.a imports p.two.a", "p.two.b imports p.one.b"}
    assert set(by_folder["p/deep"].split(": ")[0].split(" -> ")) == {"x/", "helper.py"}


def test_public_classes_of_one_name_in_any_package(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "p/a.py": "class Episode: ...\nclass _Row: ...\nclass Call: ...\n",
            "p/b.py": "class Episode: ...\nclass _Row: ...\n",
            "q/a.py": "class Call: ...\n",
        },
    )
    assert source_tree.class_homonyms(modules) == {"Call": ["p.a", "q.a"], "Episode": ["p.a", "p.b"]}


def test_a_public_constant_is_defined_in_one_module(tmp_path: Path) -> None:
    types = 'from typing import TypeVar\nT = TypeVar("T")\n'
    modules = tree(
        tmp_path,
        {"p/a.py": f"{types}POLL_S = 1.0\n_OWN = 2\n", "q/b.py": f"{types}POLL_S: float = 2.0\n_OWN = 3\n"},
    )
    assert source_tree.constant_homonyms(modules) == {"POLL_S": ["p.a", "q.b"]}


def test_files_of_one_name_are_for_the_same_roles_in_parallel_folders(tmp_path: Path) -> None:
    roles = {f"p/g/{dialect}/{role}.py": "" for dialect in ("x", "y", "z") for role in ("request", "reply")}
    rooms = {f"p/{room}/{name}.py": "" for room in ("client", "server") for name in ("core", "wire")}
    once = {"p/g/v/tree.py": "", "p/g/w/tree.py": ""}
    packages = {"p/__main__.py": "", "q/wire.py": "", "p/g/__init__.py": "", "p/g/x/__init__.py": ""}
    modules = tree(tmp_path, {**roles, **rooms, **once, **packages})
    # Rooms are not parallel, nor are folders that share a single name; another package may have the name.
    assert source_tree.file_homonyms(modules) == {
        "p: core.py": ["p/client", "p/server"],
        "p: tree.py": ["p/g/v", "p/g/w"],
        "p: wire.py": ["p/client", "p/server"],
    }
    modules = tree(tmp_path, {"p/server/request.py": ""})
    assert "p/server" in source_tree.file_homonyms(modules)["p: request.py"]


def test_protocols_and_abstract_classes_with_fewer_than_two_implementations(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "p/seams.py": """
from abc import ABC, ABCMeta
from typing import Generic, Protocol, TypeVar
T = TypeVar("T")
class Store(ABC): ...
class Sampler(metaclass=ABCMeta): ...
class Counter(Protocol):
    total: int
    def count(self) -> None: ...
class Link(Protocol[T]):
    def send(self, message: T) -> None: ...
class Report(Protocol):
    def __call__(self, text: str) -> None: ...
class TrainingClient(Protocol):
    def forward(self) -> None: ...
""",
            "p/a.py": """
from p import seams
class Disk(seams.Store): ...
class Memory(seams.Store): ...
class Remote(Sampler, ABC): ...
class Vllm(Remote): ...
class Metrics:
    def __init__(self):
        self.total = 0
    def count(self): ...
class More(Metrics):
    def also(self): ...
class Wide(Counter, Protocol):
    def more(self) -> None: ...
class Half:
    def count(self): ...
class Server:
    def send(self, message): ...
class Trainer:
    def forward(self): ...
""",
        },
    )
    assert source_tree.Seams(modules).few() == {
        "p.seams.Sampler": ["p.a.Vllm"],
        "p.a.Remote": ["p.a.Vllm"],
        "p.seams.Link": ["p.a.Server"],
        "p.a.Wide": [],
    }


def test_small_lonely_and_unused_modules_are_listed(tmp_path: Path) -> None:
    modules = tree(
        tmp_path,
        {
            "p/__main__.py": "import p.a, p.b\n",
            "p/a.py": "import p.b\ndef f(): ...\ndef _g(): ...\n",
            "p/b.py": "def f(): ...\nclass A: ...\n",
            "p/left.py": "X = 1\n",
            "p/public.py": '__all__ = ["X"]\nX = 1\n',
        },
    )
    graph = source_tree.import_graph(modules)
    assert house.one_importer(modules, graph) == {"p.a": ["p.__main__"]}
    assert house.unused(modules, graph) == ["p.left"]
    small = house.survey(tmp_path / "src").remarks["modules with one public function only"]
    assert small == ["p.a"]


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


def test_a_module_is_at_work_when_its_functions_run_but_not_while_it_is_imported(tmp_path: Path) -> None:
    tree(
        tmp_path,
        {
            "p/__main__.py": "import asyncio\nfrom p import a\nasyncio.run(a.main())\na.publish()\n",
            "p/a.py": """
import asyncio
from p import b, c
async def main():
    await asyncio.gather(sleeper(), asyncio.to_thread(c.in_a_thread))
async def sleeper():
    import p.d
    await asyncio.sleep(0)
def publish(): ...
""",
            "p/b.py": "def at_import(): ...\nat_import()\n",
            "p/c.py": "def in_a_thread(): ...\n",
            "p/d.py": "class D:\n    names = [name for name in 'abc']\n",
        },
    )
    (tmp_path / "trace").mkdir()
    path = os.pathsep.join([str(episode_trace.TRACER), str(tmp_path / "src")])
    trace = {"EPISODE_TRACE": str(tmp_path / "trace"), "EPISODE_TRACE_SRC": str(tmp_path / "src")}
    command = [sys.executable, "-m", "p"]
    subprocess.run(command, env={**os.environ, **trace, "PYTHONPATH": path}, check=True, timeout=60)
    (file,) = (tmp_path / "trace").iterdir()
    events = {(kind, name) for kind, _, name in map(str.split, file.read_text().splitlines())}
    assert events == {("run", "p/a.py"), ("run", "p/c.py"), ("publish", "p/a.py")}


def test_a_trace_is_cut_at_the_first_claim_and_the_last_publication(tmp_path: Path) -> None:
    a, b, c = (f"tinkerscript/{name}.py" for name in ("client/a", "server/b", "train/c"))
    modules = tree(tmp_path, {a: "", b: "", c: ""})
    records = {
        "1": f"run 10 {a}\nclaim 20 httpx\nrun 1000000020 {a}\nclaim 1000000030 httpx\n",
        "2": f"run 19 {b}\nrun 21 {b}\npublish 5000000000 {b}\n",
        "3": f"publish 15 {c}\nrun 2000000020 {c}\npublish 3000000000 {c}\nrun 3000000001 {b}\n",
    }
    (tmp_path / "trace").mkdir()
    for pid, text in records.items():
        (tmp_path / "trace" / pid).write_text(text)
    assert episode_trace.stops_of(tmp_path / "trace", modules) == {
        "worker": {"tinkerscript.client.a": 1.0},
        "server": {"tinkerscript.server.b": 1e-9},
        "trainer": {"tinkerscript.train.c": 2.0},
    }
    (tmp_path / "trace" / "3").unlink()
    with pytest.raises(RuntimeError, match="0 times from a `publish`"):
        episode_trace.stops_of(tmp_path / "trace", modules)
