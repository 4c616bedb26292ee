"""Mutation testing: puts faults into the modules that must not fail, and counts those that the tests notice.

    .venv-tests/bin/python dev/mutants.py [book leases] [--sample 20] [--seed 1]

`mutants.toml` lists the modules, the tests that should notice their faults, and the faults that may live. The
mutants are those of mutmut's operators, statements left out, and conditions negated; never of what only
people read: strings, logging, messages of errors, annotations. mutmut's own runner puts a trampoline in place
of each function, which changes signatures and leaves out class bodies and decorated functions, and it neither
samples nor takes tests per module. Here a mutated file is tested as it is, in a copy of the checkout: by the
tests that reach the mutated lines, the fastest first, forked from a process that has imported the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import unified_diff
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import libcst as cst
import libcst.matchers as m
import pytest
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

ROOT = Path(__file__).parents[1]
ENOUGH = 0.85
TIMED_OUT = 124
PYTEST = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
# They are imported before pytest starts.
PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]

ZIP = m.Call(func=m.Name("zip"))
"""Its `strict=True` is an assertion."""

LEFT_OUT = (
    m.Arg(keyword=m.Name("strict") | m.Name("frozen") | m.Name("kw_only") | m.Name("slots")),
    *(m.Annotation(), m.Assert(), m.Decorator(), m.FormattedString(), m.Import(), m.ImportFrom()),
    m.Call(func=m.Attribute(value=m.Name("logger") | m.Name("logging")) | m.Name("cast") | m.Name("TypeVar")),
    # `__all__` and aliases of types.
    m.Assign(targets=[m.AssignTarget(m.Name(m.MatchRegex(r"__all__|_?[A-Z]\w*[a-z]\w*")))]),
)


def left_out(node: cst.Expr | cst.Raise) -> Iterator[cst.CSTNode]:
    """A call whose result nobody uses, or an error that is raised."""
    if isinstance(node, cst.Raise) or isinstance(node.value, cst.Call | cst.Await):
        yield cst.Pass()


def negated(node: cst.If | cst.CompIf) -> Iterator[cst.CSTNode]:
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(cst.Not(), test))


OPERATORS: list[tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]] = [
    *(each for each in mutation_operators if each[1] is not operator_string),
    *((cst.Expr, left_out), (cst.Raise, left_out), (cst.If, negated), (cst.CompIf, negated)),
]


@dataclass(frozen=True)
class Mutant:
    file: str
    tree: cst.Module
    node: cst.CSTNode
    replacement: cst.CSTNode
    lines: range
    """Who reaches the mutated code reaches one of these."""

    @cached_property
    def code(self) -> str:
        mutated: Any = self.tree.deep_replace(self.node, self.replacement)
        return mutated.code

    @cached_property
    def diff(self) -> list[str]:
        before, after = self.tree.code.splitlines(), self.code.splitlines()
        return list(unified_diff(before, after, self.file, self.file, lineterm="", n=1))

    def changed(self, sign: str) -> str:
        return " ".join(line[1:].strip() for line in self.diff[2:] if line.startswith(sign))

    def is_like(self, known: dict[str, str]) -> bool:
        """Whether it is an entry of the faults that may live; one without `mutant` is any of its line."""
        added = self.changed("+")
        place = (known["file"], known["line"], known.get("mutant", added))
        return place == (self.file, self.changed("-"), added)


class MutantFinder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file
        self._wrapper = MetadataWrapper(cst.parse_module((ROOT / file).read_text()))
        self._statements: list[cst.CSTNode] = []
        self.found: list[Mutant] = []
        self._wrapper.visit(self)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if m.matches(node, m.OneOf(*LEFT_OUT)):
            return False
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._statements.append(node)
        for kind, operator in () if m.matches(node, ZIP) else OPERATORS:
            for mutated in operator(node) if isinstance(node, kind) else ():
                lines = self._lines(node)
                self.found.append(Mutant(self._file, self._wrapper.module, node, mutated, lines))
        return not isinstance(node, cst.Raise)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._statements and self._statements[-1] is original_node:
            self._statements.pop()

    def _lines(self, node: cst.CSTNode) -> range:
        """Those of its statement, or of a compound statement those up to the node."""
        statement = self._statements[-1]
        last = statement if isinstance(statement, cst.SimpleStatementLine) else getattr(node, "test", node)
        ends: list[Any] = [self.get_metadata(PositionProvider, each) for each in (statement, last)]
        return range(ends[0].start.line, ends[1].end.line + 1)


class Baseline(NamedTuple):
    """What the tests do without a mutant."""

    seconds: dict[str, float]
    """Test -> its duration."""

    reached: dict[str, dict[str, list[str]]]
    """File -> line -> tests; the test "" is the import."""

    modules: list[str]
    """Third-party modules that they import."""

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach the mutated lines, the fastest first; all tests if only the import does."""
        lines = self.reached[mutant.file]
        found = {test for line in mutant.lines for test in lines.get(str(line), [])}
        found = set(self.seconds) if found == {""} else found - {""}
        return sorted(found, key=lambda test: self.seconds[test])


class Measuring:
    """A pytest plugin that takes the baseline."""

    def __init__(self, files: list[str]) -> None:
        self._files = [str(Path(file).resolve()) for file in files]
        self._coverage = coverage.Coverage(data_file=None, include=self._files)
        self._seconds: dict[str, float] = {}
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        started = time.perf_counter()
        result = yield
        self._seconds[item.nodeid] = time.perf_counter() - started
        self._coverage.switch_context("")
        return result

    def baseline(self) -> Baseline:
        self._coverage.stop()
        specs = [(name, getattr(module, "__spec__", None)) for name, module in sys.modules.items()]
        modules = [name for name, spec in specs if spec and "site-packages" in (spec.origin or "")]
        data, here = self._coverage.get_data(), Path.cwd()
        lines: dict[str, Any] = {
            str(Path(file).relative_to(here)): data.contexts_by_lineno(file) for file in self._files
        }
        return Baseline(self._seconds, lines, modules)


class Leaving:
    """A pytest plugin that ends the process without collecting the garbage of everything imported."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        os._exit(exitstatus)


def in_a_fork(work: Callable[[], int], log: Path, *, limit_s: float = 1200) -> int:
    """What `work` returns, or TIMED_OUT after `limit_s` seconds."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            code = work()
        except Exception:
            logging.exception("the tests could not run")
        finally:
            os._exit(code)
    ended = os.pidfd_open(child)
    in_time, _, _ = select.select([ended], [], [], limit_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ended)
    return os.waitstatus_to_exitcode(status) if in_time else TIMED_OUT


class Score(NamedTuple):
    mutants: int
    tried: int
    noticed: int
    may_live: int

    def row(self, name: str) -> str:
        others = self.tried - self.noticed - self.may_live
        share = f"{self.noticed / self.tried:.0%}"
        return f"| {' | '.join(map(str, (name, *self[:3], share, self.may_live, others)))} |"


class Runner:
    """Tries mutants in the working directory, a copy of the checkout."""

    def __init__(self, folder: Path, known: list[dict[str, str]]) -> None:
        self._log, self._measured, self._known = folder / "log", folder / "baseline.json", known

    def score(self, files: list[str], tests: list[str], rng: random.Random, sample: int) -> Score:
        mutants = [mutant for file in files for mutant in MutantFinder(file).found]
        chosen = rng.sample(mutants, min(sample, len(mutants))) if sample else mutants
        baseline = self._baseline(files, tests)
        living = list[Mutant]()
        for number, mutant in enumerate(chosen, 1):
            print(f"{number}/{len(chosen)}", end="\r", file=sys.stderr, flush=True)
            if not self._is_noticed(mutant, baseline):
                living.append(mutant)
        may_live = sum(any(mutant.is_like(known) for known in self._known) for mutant in living)
        return Score(len(mutants), len(chosen), len(chosen) - len(living), may_live)

    def _baseline(self, files: list[str], tests: list[str]) -> Baseline:
        def measure() -> int:
            plugin = Measuring(files)
            code = pytest.main([*PYTEST, *tests], plugins=[plugin])
            self._measured.write_text(json.dumps(plugin.baseline()))
            return code

        self._must_pass(measure)
        baseline = Baseline(*json.loads(self._measured.read_text()))
        for module in baseline.modules:
            # Some modules can only be imported by their packages, in an order of their own.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        self._must_pass(lambda: pytest.main([*PYTEST, "--collect-only", *baseline.seconds]))
        return baseline

    def _must_pass(self, work: Callable[[], int]) -> None:
        if code := in_a_fork(work, self._log):
            sys.exit(f"without a mutant the tests end with {code}:\n{self._log.read_text()[-4000:]}")

    def _is_noticed(self, mutant: Mutant, baseline: Baseline) -> bool:
        tests = baseline.tests(mutant)
        limit_s = 30 + 5 * sum(baseline.seconds[test] for test in tests)
        write(mutant.file, mutant.code)
        args = [*PYTEST, "-x", *tests]
        code = tests and in_a_fork(lambda: pytest.main(args, [Leaving()]), self._log, limit_s=limit_s)
        write(mutant.file, mutant.tree.code)
        if not code:
            reasons = [known["reason"] for known in self._known if mutant.is_like(known)]
            print("", *mutant.diff, f"=> {''.join(reasons) or 'NOT NOTICED'}", sep="\n", flush=True)
        return bool(code)


def write(file: str, code: str) -> None:
    path = Path(file)
    path.write_text(code)
    # Compiled code passes for that of a source of the same size and second.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def main() -> None:
    settings = tomllib.loads((ROOT / "dev/mutants.toml").read_text())
    modules: dict[str, dict[str, list[str]]] = settings["modules"]
    parser = argparse.ArgumentParser(description="Mutation testing.")
    parser.add_argument("modules", nargs="*", default=[*modules], metavar="MODULE", help=", ".join(modules))
    parser.add_argument("--sample", type=int, default=20, help="mutants of each module; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if unknown := set(args.modules) - set(modules):
        parser.error(f"there is no module {', '.join(sorted(unknown))}; there are {', '.join(modules)}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "site")
        )
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy / "src")
        PYTEST.append(f"--basetemp={folder}/t")
        runner = Runner(Path(folder), settings["may_live"])
        scores: dict[str, Score] = {}
        for name in args.modules:
            rng = random.Random(f"{args.seed} {name}")
            scores[name] = runner.score(**modules[name], rng=rng, sample=args.sample)
            print(f"\n{scores[name].row(name)}", flush=True)
        os.chdir(ROOT)
    total = scores["all"] = Score(*map(sum, zip(*scores.values(), strict=True)))
    print(
        "\n| module | mutants | tried | noticed | share | may live | others |\n|---|---|---|---|---|---|---|"
    )
    print(*(score.row(name) for name, score in scores.items()), sep="\n")
    sys.exit(total.noticed < ENOUGH * total.tried)


if __name__ == "__main__":
    main()
