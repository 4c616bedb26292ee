"""The demo task: its splits are disjoint as problems, and it runs under plain Inspect."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from inspect_ai import eval_async
from inspect_ai.model import ModelOutput, ModelUsage, get_model

REPOSITORY = Path(__file__).resolve().parents[2]
TASK_FILE = REPOSITORY / "examples" / "arithmetic.py"


@pytest.fixture(scope="module")
def arithmetic() -> ModuleType:
    spec = importlib.util.spec_from_file_location("arithmetic_example", TASK_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_splits_cover_every_pair_once(arithmetic: ModuleType) -> None:
    train, test = arithmetic.split_pairs("train"), arithmetic.split_pairs("test")
    assert len(train) + len(test) == 10_000
    assert set(train) | set(test) == {(a, b) for a in range(100) for b in range(100)}
    assert 450 <= len(test) <= 550


def test_a_problem_and_its_mirror_are_in_one_split(arithmetic: ModuleType) -> None:
    train = {tuple(sorted(pair)) for pair in arithmetic.split_pairs("train")}
    test = {tuple(sorted(pair)) for pair in arithmetic.split_pairs("test")}
    assert not train & test


def test_samples_state_the_sum_of_their_id(arithmetic: ModuleType) -> None:
    samples = list(arithmetic.arithmetic("test").dataset)
    assert len({sample.id for sample in samples}) == len(samples)
    for sample in samples:
        a, b = map(int, str(sample.id).split("+"))
        assert (sample.input, sample.target) == (f"What is {a}+{b}?", str(a + b))


def test_an_unknown_split_is_refused_by_name(arithmetic: ModuleType) -> None:
    with pytest.raises(ValueError, match="'dev'; use one of 'train', 'test'"):
        arithmetic.arithmetic("dev")


async def test_inspect_runs_the_file_and_scores_exactly_the_sum(
    arithmetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)  # Inspect takes files by relative paths.
    pairs = arithmetic.split_pairs("train")[:2]
    answers = [str(sum(pairs[0])), str(sum(pairs[1]) + 1000)]
    outputs = [ModelOutput.from_content("mockllm/model", answer) for answer in answers]
    for output in outputs:
        # Given because mockllm would otherwise fetch a tokenizer to count tokens with.
        output.usage = ModelUsage()
    model = get_model("mockllm/model", custom_outputs=outputs, memoize=False)
    (log,) = await eval_async(
        str(TASK_FILE.relative_to(REPOSITORY)),
        model=model,
        limit=2,
        max_connections=1,
        log_dir=str(tmp_path),
        log_format="json",
    )
    assert log.results is not None
    assert (log.status, log.results.scores[0].metrics["mean"].value) == ("success", 0.5)
