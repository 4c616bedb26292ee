"""Losses, gradients, optimizer steps and checkpoints of the embedded engine."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch

from engine_helpers import own_logprobs
from small_models import sft_datum
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.training import AllWeights, Trainer
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import EngineError


def rl_datum(length: int) -> tinker.Datum:
    random = np.random.default_rng(length)
    ids = random.integers(0, 64, length + 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": ids[1:].astype(np.int64),
            "logprobs": -random.exponential(2.0, length).astype(np.float32),
            "advantages": random.normal(size=length).astype(np.float32),
        },
    )


def gradients(trainer: Trainer) -> list[torch.Tensor]:
    return [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]


def test_bfloat16_trains_float32_weights_to_nearly_the_same(random_model: Path) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 64, (4, 13))
    data = [sft_datum(ids) for ids in rows]
    exact = Trainer(AllWeights(load_model(random_model)))
    rounded = Trainer(AllWeights(load_model(random_model)), share_prefixes=True, compute_dtype=torch.bfloat16)
    losses = [
        each.forward_backward(data, "cross_entropy", None, backward=True).metrics["loss:sum"]
        for each in (exact, rounded)
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    for one, other in zip(gradients(exact), gradients(rounded), strict=True):
        assert other.dtype == torch.float32
        assert float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0)) > 0.95
    rounded.optim_step(tinker.AdamParams(learning_rate=1e-4))
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}


def test_an_unknown_dtype_is_refused(random_model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="dtype 'half' is not one of auto, float32, bfloat16"):
        EmbeddedEngine(random_model, checkpoint_dir=tmp_path, dtype="half")


def test_cross_entropy_returns_the_models_logprobs(engine: EmbeddedEngine, random_model: Path) -> None:
    ids = [3, 9, 27, 5]
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.0, 1.0, 2.0]},
    )
    output = engine.create_training_client().forward([datum], "cross_entropy").result()
    expected = own_logprobs(load_model(random_model), ids)
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(float(-(expected[1] + 2 * expected[2])), rel=1e-5)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def test_optim_step_is_torchs_adamw(random_model: Path) -> None:
    ours, theirs = Trainer(AllWeights(load_model(random_model))), load_model(random_model)
    params = tinker.AdamParams(
        learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5
    )
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for _ in range(3):
        ours.forward_backward([rl_datum(9)], "ppo", None, backward=True)
        for mine, other in zip(ours.model.parameters(), theirs.parameters(), strict=True):
            other.grad = copy.deepcopy(mine.grad)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        before = flat(theirs)
        optimizer.step()
        metrics = ours.optim_step(params).metrics or {}
        assert metrics["grad_norm"] == pytest.approx(float(norm))
        ratio = (flat(theirs) - before).norm() / flat(theirs).norm()
        assert metrics["update_ratio"] == pytest.approx(float(ratio), rel=1e-3)
        for mine, other in zip(ours.model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


def test_a_sampling_client_keeps_its_weights_while_training_goes_on(engine: EmbeddedEngine) -> None:
    training = engine.create_training_client()
    before = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([5, 9, 33, 2])
    first = before.compute_logprobs(prompt).result()
    training.forward_backward([rl_datum(9)], "importance_sampling").result()
    training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    after = training.save_weights_and_get_sampling_client().result()
    assert before.compute_logprobs(prompt).result() == first
    assert after.compute_logprobs(prompt).result() != first


def test_a_checkpoint_brings_back_weights_and_optimizer(engine: EmbeddedEngine) -> None:
    training = engine.create_training_client()
    data, params = [rl_datum(9)], tinker.AdamParams(learning_rate=0.01)

    def one_step() -> float:
        loss = training.forward_backward(data, "importance_sampling").result().metrics["loss:sum"]
        training.optim_step(params).result()
        return loss

    one_step()
    path = training.save_state("here").result().path
    continued = [one_step() for _ in range(3)]
    training.load_state_with_optimizer(path).result()
    assert [one_step() for _ in range(3)] == pytest.approx(continued, rel=1e-6)
    training.load_state(path).result()
    assert [one_step() for _ in range(3)] != pytest.approx(continued, rel=1e-6)
    assert (Path(path) / "tokenizer.json").is_file()


def test_a_checkpoint_name_cannot_leave_its_folder(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError, match="must be a plain file name"):
        engine.create_training_client().save_state("../up").result()
