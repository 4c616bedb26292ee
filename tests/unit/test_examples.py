"""The example programs stay what they are for, and the first tasks score what a model says."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval_async
from inspect_ai.model import ModelName, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Target
from inspect_ai.solver import TaskState

EXAMPLES = Path(__file__).parents[2] / "examples"
MINIMAL_GRPO = EXAMPLES / "minimal_grpo.py"


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


START = EXAMPLES.parent / "docs" / "start.md"
STARTER_TASK = EXAMPLES.parent / "src" / "tinkerscript" / "starter" / "task.py"


def task_of_start() -> str:
    (code,) = re.findall(
        r"A task in `my_eval.py`:\n\n```python\n(.*?)```", START.read_text(), flags=re.DOTALL
    )
    return code


@pytest.mark.parametrize("code", [task_of_start(), STARTER_TASK.read_text()], ids=["start.md", "init"])
async def test_the_first_task_finds_the_answer_in_what_a_chat_model_says(code: str, tmp_path: Path) -> None:
    """With `exact()` every reward was 0: nothing trained."""
    (tmp_path / "first.py").write_text(code)
    task = runpy.run_path(str(tmp_path / "first.py"))["sums"]("test")
    sample = task.dataset[0]
    asked = re.findall(r"\d+", str(sample.input))
    said = {
        f"{asked[0]} + {asked[1]} = {sample.target}.": "C",
        f"The sum of {asked[0]} and {asked[1]} is **{sample.target}**.": "C",
        str(sample.target): "C",
        f"{sample.target} or {int(str(sample.target)) + 1}": "I",
        "I do not know.": "I",
    }
    (scorer,) = task.scorer
    for reply, value in said.items():
        state = TaskState(ModelName("mockllm/model"), 1, 1, sample.input, [])
        state.output = ModelOutput.from_content("mockllm/model", reply)
        assert (await scorer(state, Target(sample.target))).value == value, reply


# The demo's task


@pytest.fixture(scope="module")
def task_file() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "arithmetic.py"))


def test_splits_cover_every_pair_once_and_a_problem_is_with_its_mirror(task_file: dict[str, Any]) -> None:
    train, test = (task_file["split_pairs"](split) for split in ("train", "test"))
    assert sorted([*train, *test]) == [(a, b) for a in range(100) for b in range(100)]
    assert 450 <= len(test) <= 550
    assert not {tuple(sorted(pair)) for pair in train} & {tuple(sorted(pair)) for pair in test}


def test_samples_state_the_sum_of_their_id(task_file: dict[str, Any]) -> None:
    samples = list(task_file["arithmetic"]("test").dataset)
    assert len({sample.id for sample in samples}) == len(samples)
    for sample in samples:
        a, b = map(int, str(sample.id).split("+"))
        assert (sample.input, sample.target) == (f"What is {a}+{b}?", str(a + b))
    with pytest.raises(ValueError, match="'dev'; use one of 'train', 'test'"):
        task_file["arithmetic"]("dev")


async def test_inspect_runs_the_file_and_scores_exactly_the_sum(
    task_file: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)  # Inspect takes files by relative paths.
    pairs = task_file["split_pairs"]("train")[:2]
    answers = [str(sum(pairs[0])), str(sum(pairs[1]) + 1000)]
    outputs = [ModelOutput.from_content("mockllm/model", answer) for answer in answers]
    for output in outputs:
        # Given because mockllm would otherwise fetch a tokenizer to count tokens with.
        output.usage = ModelUsage()
    model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
    options: dict[str, Any] = {"limit": 2, "max_connections": 1, "log_format": "json"}
    (log,) = await eval_async("arithmetic.py", model=model, log_dir=str(tmp_path), **options)
    assert log.results is not None
    assert (log.status, log.results.scores[0].metrics["mean"].value) == ("success", 0.5)
