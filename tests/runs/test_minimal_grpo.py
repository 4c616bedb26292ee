"""`examples/minimal_grpo.py`: a short run learns, and one update moves probability the right way."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import model_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENIZER = Tokenizer.from_file(str(model_folder("tiny") / "tokenizer.json"))
QUESTION = "<|im_start|>user\nWhat is 23+45?<|im_end|>\n<|im_start|>assistant\n"
PROMPT = tinker.ModelInput.from_ints(TOKENIZER.encode(QUESTION).ids)
GOOD, BAD = TOKENIZER.encode("68<|im_end|>").ids, TOKENIZER.encode("67<|im_end|>").ids


@pytest.fixture
def minimal_grpo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import minimal_grpo

    return minimal_grpo


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Any]:
    with EmbeddedEngine(model_folder("tiny"), checkpoint_dir=tmp_path, seed=1) as engine:
        yield engine.create_training_client()


async def action_of(training: Any, sampled: list[int]) -> tinker.SampledSequence:
    """`sampled` after PROMPT, as if the current weights had sampled it."""
    policy = await training.save_weights_and_get_sampling_client()
    whole = tinker.ModelInput.from_ints(PROMPT.to_ints() + sampled)
    logprobs = (await policy.compute_logprobs(whole))[PROMPT.length :]
    return tinker.SampledSequence(
        stop_reason="stop",
        sequence_id="",
        tokens_np=np.array(sampled, np.int32),
        logprobs_np=np.array(logprobs, np.float32),
    )


async def test_a_short_run_trains_saves_and_raises_the_held_out_accuracy(
    minimal_grpo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(minimal_grpo, "PROBLEMS", 16)
    monkeypatch.setattr(minimal_grpo, "EVAL_EPISODES", 64)
    monkeypatch.setattr(minimal_grpo, "INTERIM_EVAL_EPISODES", 8)
    await minimal_grpo.main(steps=2, seed=1)

    out = capsys.readouterr().out
    assert re.findall(r"^ *(\d+) .*\d\.\d{3} ", out, flags=re.MULTILINE) == ["0", "1", "2"]
    summary = re.search(r"temperature 1: (\d\.\d+) -> (\d\.\d+)", out)
    assert summary is not None
    before, after = map(float, summary.groups())
    assert 0.2 < before < 0.6
    assert after > before + 0.05

    weights = load_file(model_folder("tiny") / "model.safetensors")
    trained = load_file(tmp_path / "runs" / "minimal_grpo" / "final" / "model.safetensors")
    assert weights.keys() == trained.keys()
    assert all(np.any(weights[name] != trained[name]) for name in weights)


async def test_an_update_makes_the_better_episode_likelier_and_the_worse_one_less_likely(
    minimal_grpo: ModuleType, training: Any
) -> None:
    good, bad = await action_of(training, GOOD), await action_of(training, BAD)
    turns = [[(PROMPT, good)], [(PROMPT, bad)]]
    await minimal_grpo.update(training, turns, np.array([[1.0, 0.0]]), random.Random(0))
    assert sum((await action_of(training, GOOD)).logprobs) > sum(good.logprobs)
    assert sum((await action_of(training, BAD)).logprobs) < sum(bad.logprobs)


async def test_a_group_of_equal_rewards_changes_nothing(minimal_grpo: ModuleType, training: Any) -> None:
    turns = [[(PROMPT, await action_of(training, ids))] for ids in (GOOD, BAD)]
    # An optimizer step without a gradient would move the weights by the momentum of this one.
    await minimal_grpo.update(training, turns, np.array([[1.0, 0.0]]), random.Random(0))
    before = await action_of(training, GOOD)
    await minimal_grpo.update(training, turns, np.array([[1.0, 1.0]]), random.Random(0))
    assert (await action_of(training, GOOD)).logprobs == before.logprobs


def test_only_sampled_tokens_of_a_datum_train(minimal_grpo: ModuleType) -> None:
    action = tinker.SampledSequence(
        stop_reason="stop",
        sequence_id="",
        tokens_np=np.array([10, 11], np.int32),
        logprobs_np=np.array([-0.5, -1.5], np.float32),
    )
    datum = minimal_grpo.to_datum(tinker.ModelInput.from_ints([5, 6, 7]), action, 0.25)
    inputs = {name: data.to_numpy().tolist() for name, data in datum.loss_fn_inputs.items()}
    assert datum.model_input.to_ints() == [5, 6, 7, 10]
    assert inputs == {
        "target_tokens": [6, 7, 10, 11],
        "logprobs": [0, 0, -0.5, -1.5],
        "advantages": [0, 0, 0.25, 0.25],
    }
