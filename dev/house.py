"""Measures the house: what `src/` consists of, who imports whom, and what an episode passes on its way.

    python dev/house.py [--check | --json | --trace] [--root CHECKOUT]

The report counts; only import cycles and homonyms are problems, and make the exit status 1. `--check` prints
the problems alone. `--trace` runs one training step and lists the modules at work between an episode's claim
and the published weights (`episode_trace.py`).
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import episode_trace
from source_tree import (
    FunctionNode,
    Graph,
    Module,
    Modules,
    Seams,
    class_homonyms,
    constant_homonyms,
    cycles,
    file_homonyms,
    folder_cycles,
    import_graph,
    importers,
    read_modules,
)

ROOT = Path(__file__).parents[1]

SMALL_MODULE = 60
"""Lines below which a module with one public function probably belongs to a neighbor."""


@dataclass(frozen=True)
class House:
    """What was found in one `src`."""

    counts: dict[str, int | str]
    problems: dict[str, list[str]]
    """Kind -> what has to go. Any makes the check fail."""

    remarks: dict[str, list[str]]
    """Kind -> what deserves a look."""


def survey(src: Path) -> House:
    """Measure all of it."""
    modules = read_modules(src)
    graph = import_graph(modules)
    problems = {
        "import cycles of files": [" -> ".join(each) for each in cycles(graph)],
        "import cycles of folders": folder_cycles(modules, graph),
        "class homonyms": _listed(class_homonyms(modules)),
        "constant homonyms": _listed(constant_homonyms(modules)),
        "file homonyms": _listed(file_homonyms(modules)),
    }
    remarks = {
        "Protocols and ABCs with fewer than two implementations": _listed(Seams(modules).few()),
        "modules with one importer": _listed(one_importer(modules, graph)),
        "modules with one public function only": [n for n in modules if _is_one_function(modules[n])],
        "modules without an importer": unused(modules, graph),
        "imports by string": [f"{n}: {text}" for n in modules for text in modules[n].imports_by_string()],
    }
    sizes = {name: module.lines for name, module in modules.items()}
    lengths = {
        f"{m.name}.{node.name}, line {node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for m in modules.values()
        for node in m.functions
    }
    counts: dict[str, int | str] = {
        "modules": len(modules),
        "lines": sum(sizes.values()),
        "code lines": sum(m.code_lines for m in modules.values() if not m.is_testing),
        "module length": _spread(sizes),
        "function length": _spread(lengths),
        "config keys": config_keys(modules),
        **{kind: len(found) for kind, found in (problems | remarks).items()},
    }
    return House(counts, problems, remarks)


def config_keys(modules: Modules, section: str = "RunConfig") -> int:
    """Keys of a config that hold a value: the fields of `RunConfig` and of its sections.

    What a section inherits from another one, as the entries of `tasks` do from `task`, is not counted again.
    """
    classes = {n.name: n for m in modules.values() for n in m.tree.body if isinstance(n, ast.ClassDef)}

    def names(node: ast.AST) -> set[str]:
        return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & classes.keys()

    def keys(name: str) -> int:
        fields = [each.annotation for each in classes[name].body if isinstance(each, ast.AnnAssign)]
        return sum(sum(map(keys, names(field))) or 1 for field in fields)

    return keys(section) if section in classes else 0


def one_importer(modules: Modules, graph: Graph) -> dict[str, list[str]]:
    """Module -> its only importer. What is run or imported implicitly has none to speak of."""
    found = importers(graph)
    return {n: found[n] for n in modules if len(found[n]) == 1 and modules[n].path.stem[:2] != "__"}


def unused(modules: Modules, graph: Graph) -> list[str]:
    """Modules that nothing imports, and that are neither packages, run by `-m`, nor public (`__all__`)."""
    found = importers(graph)
    candidates = [name for name in modules if not found[name] and modules[name].path.stem[:2] != "__"]
    return [name for name in candidates if not modules[name].has_public_names]


def _is_one_function(module: Module) -> bool:
    is_function = [isinstance(node, FunctionNode) for node in module.public]
    return is_function == [True] and module.lines < SMALL_MODULE


def _listed(found: Mapping[str, Iterable[str]]) -> list[str]:
    return [f"{name}: {', '.join(each) or 'none'}" for name, each in found.items()]


def _spread(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return "none"
    values, longest = sorted(sizes.values()), max(sizes, key=lambda name: sizes[name])
    p90 = values[int(0.9 * len(values))]
    return f"median {median(values):.0f}, p90 {p90}, max {sizes[longest]} ({longest})"


def print_report(house: House) -> None:
    """Counts first, then every remark and problem."""
    for name, count in house.counts.items():
        print(f"{name:56} {count}")
    print_lists(house.remarks | house.problems)


def print_lists(lists: Mapping[str, list[str]]) -> None:
    for kind, found in lists.items():
        if found:
            print(f"\n{kind} ({len(found)}):", *found, sep="\n  ")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="print the problems alone")
    mode.add_argument("--json", action="store_true", help="print the whole report as JSON")
    mode.add_argument("--trace", action="store_true", help="run a training step and print what it passes")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    args = parser.parse_args()
    if args.trace:
        print(episode_trace.trace_episode(args.root.resolve()).as_text())
        return 0
    house = survey(args.root / "src")
    if args.json:
        print(json.dumps(asdict(house), indent=2))
    elif args.check:
        print_lists(house.problems)
    else:
        print_report(house)
    return 1 if any(house.problems.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
