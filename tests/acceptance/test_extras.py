"""What docs/start.md says of each extra, with nothing there but what that extra installs.

test_newcomer.py tries `[server]`, `[inspect]` and the bare install in environments of their own. Torch is too
large for that: here the packages of other extras are hidden.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from command_line import ROOT
from written_run import WrittenRun, said

HIDE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in HIDDEN
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""

READ_BACK = """
from datasets import Dataset

from tinkerscript.rollouts.parquet import from_table, read_parquet

def sequences(groups):
    episodes = [episode for group in groups for episode in group.episodes]
    return [(e.episode_uuid, e.reward, r.tokens.tolist()) for e in episodes for r in e.rollouts]

expected = [("a", 1.0, [1, 2, 3, 4]), ("b", 1.0, [1, 2, 3, 4])]
assert sequences(read_parquet(run / "rollouts.parquet")) == expected
dataset = Dataset.from_parquet(str(run / "rollouts.parquet"))
assert sequences(from_table(dataset.with_format("arrow")[:])) == expected
assert len(rolled["reward"]) == 2
"""

ENGINE_COMMAND = "from tinkerscript.commands.serve_engine import sample_for_server, serve_tinker"


def printed(page: str, part_of_it: str) -> str:
    """The program of a page that has this text in it."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    (program,) = (each for each in programs if part_of_it in each)
    return program


def installed_by(*extras: str) -> Iterator[str]:
    """The distributions that come with the package and these extras."""
    pending = [("tinkerscript", ("", *extras))]
    seen = set[tuple[str, tuple[str, ...]]]()
    while pending:
        seen.add(pending[-1])
        name, chosen = pending.pop()
        yield name
        for requirement in map(Requirement, requires(name) or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in chosen):
                needed = (canonicalize_name(requirement.name), ("", *sorted(requirement.extras)))
                pending += {needed} - seen


def alone(folder: Path, program: str, *extras: str) -> None:
    """Run `program` where only the packages of these extras can be imported."""
    there = set(installed_by(*extras))
    hidden = {
        module
        for module, distributions in packages_distributions().items()
        if not there & {canonicalize_name(name) for name in distributions}
    }
    assert "inspect_ai" in hidden
    assert ("torch" in hidden) == ("engine" not in extras)
    assert ("fastapi" in hidden) == ("server" not in extras)
    (folder / "program.py").write_text(f"HIDDEN = {hidden!r}\n{HIDE}\n{program}")
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("extras", "program"),
    [
        (["engine"], printed("engine.md", "EmbeddedEngine(")),
        pytest.param(["server", "engine"], ENGINE_COMMAND, marks=pytest.mark.long),
    ],
    ids=["engine", "server and engine"],
)
def test_the_engine_needs_its_own_extra_alone(tmp_path: Path, extras: list[str], program: str) -> None:
    alone(tmp_path, program, *extras)


def test_rollouts_become_files_with_their_extra_alone(tmp_path: Path) -> None:
    with WrittenRun(tmp_path / "run") as run:
        for name in ("a", "b"):
            run.episode(name, [said(None, [1, 2], [3, 4], "1+1?", "2")])
    program = printed("rollouts.md", "recorded_groups(").replace("runs/2026-01-01_12-00-00", "run")
    alone(tmp_path, program + READ_BACK, "datasets")
