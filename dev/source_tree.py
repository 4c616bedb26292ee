"""What a tree of Python sources consists of: its modules, their imports, names and seams.

Reads the files and never imports them. `house.py` reports on `src/` with it; tests may use it too.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise
from pathlib import Path

MET_ELSEWHERE = {
    "SamplingClient": "tinker.SamplingClient",
    "TrainingClient": "tinker.TrainingClient",
    "PieceTokenizer": "the tokenizers of transformers",
}
"""Protocol -> the third-party types that implement it."""

_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Graph = Mapping[str, Collection[str]]
"""Node -> the nodes that it imports."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """Dotted; a package's `__init__.py` has the package's name."""

    path: Path
    """Relative to `src`."""

    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.path.parts[0]

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (ast.get_docstring(self.tree) or "").partition("\n")[0]

    @property
    def is_testing(self) -> bool:
        """Whether it holds fakes that are shipped for tests."""
        return "testing" in self.path.with_suffix("").parts

    @property
    def lines(self) -> int:
        """Physical lines."""
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """Lines with code on them: no blank lines, comments or docstrings (those of fields included)."""
        statements = (node for node in ast.walk(self.tree) if isinstance(node, ast.Expr))
        values = [node.value for node in statements if isinstance(node.value, ast.Constant)]
        docstrings = {(value.lineno, value.col_offset) for value in values if isinstance(value.value, str)}
        covered: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _LAYOUT and token.start not in docstrings:
                covered |= set(range(token.start[0], token.end[0] + 1))
        return sum(bool(line.strip()) for n, line in enumerate(self.text.splitlines(), 1) if n in covered)

    @property
    def functions(self) -> Iterator[FunctionNode]:
        """Functions and methods, wherever they stand."""
        return (node for node in ast.walk(self.tree) if isinstance(node, FunctionNode))

    @property
    def public(self) -> list[ast.stmt]:
        """The functions and classes at the top of the module whose names have no leading underscore."""
        named = (node for node in self.tree.body if isinstance(node, FunctionNode | ast.ClassDef))
        return [node for node in named if not node.name.startswith("_")]

    @property
    def has_public_names(self) -> bool:
        """Whether it declares `__all__`, as the modules do that users import."""
        targets = (target for n in self.tree.body if isinstance(n, ast.Assign) for target in n.targets)
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)

    def imported(self) -> Iterator[str]:
        """Every name that an import mentions, `from a import b` as `a.b`; literals of `import_module` too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join([*self._parents(node.level), *([node.module] if node.module else [])])
                yield from (f"{base}.{alias.name}" for alias in node.names)
        yield from (str(n.value) for n in _imported_by_call(self.tree) if isinstance(n, ast.Constant))

    def _parents(self, level: int) -> tuple[str, ...]:
        """Of a relative import: the package that `level` dots stand for."""
        return self.path.parts[:-level] if level else ()

    def imports_by_string(self) -> list[str]:
        """`import_module` calls that spell the module out, where a type checker sees no edge."""
        spelled = (ast.unparse(argument) for argument in _imported_by_call(self.tree))
        return [text for text in spelled if text.lstrip("f'\"").startswith(("{__name__}", self.package))]


def _imported_by_call(tree: ast.Module) -> Iterator[ast.expr]:
    """What is passed to `importlib.import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            yield node.args[0]


Modules = Mapping[str, Module]


def read_modules(src: Path) -> dict[str, Module]:
    """Dotted name -> module, of every Python file below `src`."""
    modules: dict[str, Module] = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path.relative_to(src), path.read_text(encoding="utf-8"))
    return modules


# Imports


def import_graph(modules: Modules) -> dict[str, set[str]]:
    """Module -> the modules of `src` that it imports, in functions and for type checking too.

    That importing `a.b` runs the `__init__` of `a` is not an edge.
    """
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        candidates = ((full, full.rpartition(".")[0]) for full in module.imported())
        found = {next((each for each in pair if each in modules), name) for pair in candidates}
        graph[name] = found - {name}
    return graph


def cycles(graph: Graph) -> list[list[str]]:
    """Import cycles, each as `[a, b, a]`: a imports b, which imports a. They share no edge."""
    left = {node: sorted(graph[node]) for node in sorted(graph)}
    found: list[list[str]] = []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            cycle = list(reversed(error.args[1]))
            left[cycle[0]].remove(cycle[1])
            found.append(cycle)
        else:
            return found


def folder_graphs(modules: Modules, graph: Graph) -> dict[str, dict[str, dict[str, str]]]:
    """Folder -> the graph among its children (files, and subfolders with all that is in them).

    A child's edges come with one import each that makes them.
    """
    folders: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for importer, imported in graph.items():
        for name in sorted(imported):
            one, other = modules[importer].path, modules[name].path
            depth = next(n for n, (a, b) in enumerate(zip(one.parts, other.parts, strict=False)) if a != b)
            edges = folders["/".join(one.parts[:depth]) or "src"][_child(one, depth)]
            edges.setdefault(_child(other, depth), f"{importer} imports {name}")
    return {folder: dict(children) for folder, children in folders.items()}


def _child(path: Path, depth: int) -> str:
    return path.parts[depth] + ("/" if depth < len(path.parts) - 1 else "")


def folder_cycles(modules: Modules, graph: Graph) -> list[str]:
    """Cycles among the children of a folder, as `folder: a/ -> b.py -> a/ (their imports)`."""
    return [
        f"{folder}: {' -> '.join(cycle)} ({', '.join(children[a][b] for a, b in pairwise(cycle))})"
        for folder, children in sorted(folder_graphs(modules, graph).items())
        for cycle in cycles(children)
    ]


def importers(graph: Graph) -> dict[str, list[str]]:
    """Module -> who imports it."""
    found: dict[str, list[str]] = {name: [] for name in graph}
    for importer in sorted(graph):
        for name in graph[importer]:
            found[name].append(importer)
    return found


# Names


def class_homonyms(modules: Modules) -> dict[str, list[str]]:
    """Name of a public class -> the modules of both packages that define one, where there are several."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in module.public:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    return _several(places)


def constant_homonyms(modules: Modules) -> dict[str, list[str]]:
    """Name of a public constant -> the modules of both packages that define one, where there are several.

    Type variables are no constants: each module declares its own.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        for node in module.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            value = getattr(node, "value", None)
            is_type = isinstance(value, ast.Call) and ast.unparse(value.func) in {"TypeVar", "ParamSpec"}
            names = (each.id for each in targets if isinstance(each, ast.Name) and each.id.isupper())
            for name in names:
                if not name.startswith("_") and not is_type:
                    places[name].append(module.name)
    return _several(places)


def file_homonyms(modules: Modules) -> dict[str, list[str]]:
    """`package: file.py` -> its folders, where there are several that are not parallel."""
    folders: dict[Path, set[str]] = defaultdict(set)
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules.values():
        if not module.path.stem.startswith("__"):
            folders[module.path.parent].add(module.path.name)
            places[f"{module.package}: {module.path.name}"].append(module.path.parent.as_posix())

    def parallel(one: str, other: str) -> bool:
        """Siblings below a room that play more than one common role. Rooms are not each other's variants."""
        a, b = Path(one), Path(other)
        return a.parent == b.parent and len(a.parts) > 2 and len(folders[a] & folders[b]) > 1

    pairs = {name: list(combinations(found, 2)) for name, found in places.items()}
    return _several({n: places[n] for n in places if not all(parallel(*pair) for pair in pairs[n])})


def _several(places: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: sorted(places[name]) for name in sorted(places) if len(places[name]) > 1}


# Seams


@dataclass(frozen=True)
class Class:
    """A class statement."""

    module: str
    node: ast.ClassDef

    @property
    def bases(self) -> set[str]:
        """Names of the bases, without modules and type parameters; `metaclass=ABCMeta` is one too."""
        written = [*self.node.bases, *(keyword.value for keyword in self.node.keywords)]
        return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in written}

    @property
    def members(self) -> set[str]:
        """Methods, fields, and what a method assigns to `self`."""
        found = {node.name for node in self.node.body if isinstance(node, FunctionNode)}
        for node in ast.walk(self.node):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets if isinstance(node, ast.Assign | ast.AnnAssign) else []:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.add(target.attr)
                elif isinstance(target, ast.Name) and node in self.node.body:
                    found.add(target.id)
        return found


class Seams:
    """The Protocols and abstract classes of `src`, and what implements them.

    Classes are known by their bare names, which are unique where there are no homonyms.
    """

    def __init__(self, modules: Modules) -> None:
        nodes = [(m.name, node) for m in modules.values() for node in ast.walk(m.tree)]
        self._classes = [Class(module, node) for module, node in nodes if isinstance(node, ast.ClassDef)]
        self._by_name = {each.node.name: each for each in self._classes}

    def few(self) -> dict[str, list[str]]:
        """`module.Class` -> its implementations, where there are fewer than two.

        A Protocol of `__call__` alone is left out: functions implement it.
        """
        seams = [each for each in self._classes if each.bases & {"Protocol", "ABC", "ABCMeta"}]
        found = {f"{seam.module}.{seam.node.name}": self._implementations(seam) for seam in seams}
        calls = {f"{seam.module}.{seam.node.name}" for seam in seams if seam.members == {"__call__"}}
        return {name: each for name, each in found.items() if len(each) < 2 and name not in calls}

    def _implementations(self, seam: Class) -> list[str]:
        name, found = seam.node.name, set[str]()
        for each in self._classes:
            ancestors = self._ancestors(each)
            if each is seam or each.bases & {"Protocol", "ABC", "ABCMeta"}:
                continue
            fits = "Protocol" in seam.bases and self._all_members(seam) <= self._all_members(each)
            if name in ancestors or fits:
                found.add(f"{each.module}.{each.node.name}")
        return [*sorted(found), *([MET_ELSEWHERE[name]] if name in MET_ELSEWHERE else [])]

    def _ancestors(self, each: Class) -> set[str]:
        found, left = set[str](), set(each.bases)
        while left:
            name = left.pop()
            found.add(name)
            left |= self._by_name[name].bases - found if name in self._by_name else set()
        return found

    def _all_members(self, each: Class) -> set[str]:
        inherited = [self._by_name[name].members for name in self._ancestors(each) & set(self._by_name)]
        return each.members.union(*inherited)
