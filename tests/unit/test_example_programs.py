"""The example programs stay what they are for: `minimal_grpo.py` is read in one sitting."""

from __future__ import annotations

import ast
from pathlib import Path

MINIMAL_GRPO = Path(__file__).parents[2] / "examples" / "minimal_grpo.py"


def test_minimal_grpo_has_at_most_150_lines() -> None:
    assert len(MINIMAL_GRPO.read_text(encoding="utf-8").splitlines()) <= 150


def test_minimal_grpo_shows_the_whole_algorithm() -> None:
    """It uses the engine and nothing that trains: no training loop of ours, none of tinker_cookbook's."""
    nodes = list(ast.walk(ast.parse(MINIMAL_GRPO.read_text(encoding="utf-8"))))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert not {name for name in modules if name.startswith("tinker_cookbook")}
    ours = {name for name in modules if name.startswith("tinkerscript.")}
    assert {name.split(".")[1] for name in ours} <= {"engine", "model_folder"}
