"""`tinkerscript train --plan` says what would run where; every example has a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinkerscript.commands.plan import plan
from tinkerscript.config import load_config

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_has_a_plan(path: Path) -> None:
    lines = plan(load_config(path))
    assert lines[0] == "processes"
    assert any(line.startswith("  trainer ") for line in lines)


def test_a_node_of_replicas() -> None:
    lines = plan(load_config(EXAMPLES / "scale" / "one_node.yaml"))
    text = "\n".join(lines)
    assert "cuda:0, bfloat16: LoRA adapter of rank 32 of Qwen/Qwen3-8B" in text
    assert [line.split()[-2] for line in lines if "vLLM replica " in line] == [f"{n}," for n in range(1, 8)]
    assert "worker -> interchange server -> trainer -> one of 7 vLLM replicas" in text
    assert "2 live versions and a free slot, of 4" in text
    assert "200 steps of 64 groups of 16: 1024 a step, at most 1024 at once" in text


def test_a_service_and_a_run_in_one_process() -> None:
    service = "\n".join(plan(load_config(EXAMPLES / "scale" / "tinker_service.yaml")))
    assert "trainer -> the Tinker service" in service
    alone = "\n".join(plan(load_config(EXAMPLES / "arithmetic.yaml", ["enable_tinkerscript_mode=false"])))
    assert "interchange server" not in alone
    assert "trainer -> its engine" in alone
