"""Every test has an assertion that can fail, its own or that of a helper which it calls."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
FAILING = re.compile(
    r"\.(raises|warns|fail|assert_\w+|to_(be|have|contain)_\w+)|hypothesis\.stateful\.run_state_machine_as_test"
)
"""What pytest, numpy, torch, Playwright and hypothesis have for it, beside `assert`."""


def faults(sources: dict[Path, str]) -> list[str]:
    """The tests that cannot fail and the assertions of constants in the files, with their lines."""
    found, can_fail = list[str](), set[FunctionNode]()
    tests: dict[FunctionNode, Path] = {}
    calls: dict[FunctionNode, set[str]] = {}
    """Function that has no assertion -> the helpers that it calls, as `module.function` or `.method`."""

    helpers: dict[str, list[FunctionNode]] = defaultdict(list)
    for path, text in sources.items():
        statements = list(_statements(ast.parse(text)))
        imported = {
            each.asname or each.name: f"{node.module}.{each.name}"
            for node in statements
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        for node in statements:
            if isinstance(node, ast.Assert) and _is_constant(node.test):
                found.append(f"{path}:{node.lineno}: cannot fail")
            if isinstance(node, FunctionNode):
                if node.name.startswith("test_"):
                    tests[node] = path
                helpers[f"{path.stem}.{node.name}"].append(node)
                helpers[f".{node.name}"].append(node)
                if any(
                    isinstance(each, ast.Assert) and not _is_constant(each.test) for each in _statements(node)
                ):
                    can_fail.add(node)
                else:
                    calls[node] = {imported.get(name, name) for name in _called(node)}
                    calls[node] |= {f"{path.stem}.{name}" for name in calls[node]}
    failing = {name for name in set().union(*calls.values()) if FAILING.fullmatch(name)}
    while True:
        names = failing | {name for name, nodes in helpers.items() if can_fail.issuperset(nodes)}
        more = {node for node, called in calls.items() if called & names} - can_fail
        if not more:
            break
        can_fail |= more
    found += [f"{path}:{test.lineno}: cannot fail" for test, path in tests.items() if test not in can_fail]
    return sorted(found)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, block, ()):
            yield child
            yield from _statements(child)


def _called(function: FunctionNode) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(name)):
                yield name
            case ast.Call(func=ast.Attribute(attr=name)):
                yield f".{name}"


def _is_constant(test: ast.expr) -> bool:
    """Whether it has the same truth value in every run: a tuple, or nothing that has a name."""
    return isinstance(test, ast.Tuple) or not any(isinstance(node, ast.Name) for node in ast.walk(test))


def test_every_test_can_fail() -> None:
    assert faults({path: path.read_text() for path in TESTS.rglob("*.py")}) == []


HELPERS = """
def check(x): assert x
async def deeper(x): await check(x)
def harmless(x): x()
class A:
    def verify(self): assert self
"""
CAN_FAIL = (
    "assert x == 1 | with pytest.raises(E): x() | np.assert_equal(x) | check(x) | deeper(x) | x.verify()"
)
CANNOT_FAIL = "x() | harmless(x) | x.harmless() | assert True | assert (x == 1, 'a') | assert 1 + 1 == 2"


def test_what_cannot_fail_is_found() -> None:
    for bodies, can_fail in ((CAN_FAIL, True), (CANNOT_FAIL, False)):
        for body in bodies.split(" | "):
            test = f"def test_it():\n    {body}\nfrom helper import check, deeper, harmless"
            found = faults({Path("helper.py"): HELPERS, Path("test_it.py"): test})
            lines = [] if can_fail else [1, 2] if body.startswith("assert") else [1]
            assert found == [f"test_it.py:{line}: cannot fail" for line in lines], body
