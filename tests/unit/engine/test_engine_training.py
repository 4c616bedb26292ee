"""Losses, gradients, optimizer steps and checkpoints of the embedded engine."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.losses import LOSSES, MASK
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


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_the_gradient_does_not_depend_on_how_a_batch_is_split(random_model: Path, loss_fn: str) -> None:
    data = [rl_datum(length) for length in (3, 17, 5, 9, 18, 2)]
    whole = Trainer(AllWeights(load_model(random_model)))
    pieces = Trainer(AllWeights(load_model(random_model)), microbatch_tokens=20)
    output = whole.forward_backward(data, loss_fn, None, backward=True)
    parts = [pieces.forward_backward(data[i : i + 2], loss_fn, None, backward=True) for i in (0, 2, 4)]
    total = sum(part.metrics["loss:sum"] for part in parts)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for one, other in zip(gradients(whole), gradients(pieces), strict=True):
        # Ratios here reach e^10: float32 sums agree to a millionth of the largest gradient, not of each.
        torch.testing.assert_close(one, other, atol=max(1e-5, 1e-6 * float(one.abs().max())), rtol=1e-4)
    split = [row["logprobs"].to_numpy() for part in parts for row in part.loss_fn_outputs]
    for row, again in zip(output.loss_fn_outputs, split, strict=True):
        np.testing.assert_allclose(row["logprobs"].to_numpy(), again, atol=1e-5)


def test_a_forward_pass_gives_the_entropy_of_each_targets_distribution(random_model: Path) -> None:
    """Also of sequences that share a microbatch; a backward pass gives none."""
    model = load_model(random_model)
    trainer = Trainer(AllWeights(model), microbatch_tokens=20)
    data = [rl_datum(length) for length in (3, 17, 5, 9)]
    output = trainer.forward_backward(data, "importance_sampling", None, backward=False)
    for datum, row in zip(data, output.loss_fn_outputs, strict=True):
        ids = torch.tensor([datum.model_input.to_ints()])
        with torch.no_grad():
            logits = model(ids).logits[0]
        expected = torch.distributions.Categorical(logits=logits).entropy()
        np.testing.assert_allclose(row["entropies"].to_numpy(), expected.numpy(), atol=1e-4)
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        logprobs = logits.log_softmax(-1)[torch.arange(len(targets)), torch.tensor(targets)]
        np.testing.assert_allclose(row["logprobs"].to_numpy(), logprobs.numpy(), atol=1e-4)
    trained = trainer.forward_backward(data, "importance_sampling", None, backward=True)
    assert all(row.keys() == {"logprobs"} for row in trained.loss_fn_outputs)


def test_a_grpo_step_on_three_tokens_by_hand() -> None:
    """Ratios e^0.5 = 1.6487 (clipped at 1.2), e^-0.5 = 0.6065 (clipped at 0.8) and 1."""
    ours = torch.tensor([[-0.5, -1.5, -1.0]], dtype=torch.float64, requires_grad=True)
    inputs = {
        "logprobs": torch.full((1, 3), -1.0, dtype=torch.float64),
        "advantages": torch.tensor([[2.0, -1.0, 0.5]], dtype=torch.float64),
        MASK: torch.ones(1, 3, dtype=torch.bool),
    }
    up, down = math.exp(0.5), math.exp(-0.5)
    expected = {
        # loss per token, gradient of the summed loss with respect to each log probability
        "importance_sampling": ([-2 * up, down, -0.5], [-2 * up, down, -0.5]),
        # min(1.6487 * 2, 1.2 * 2): clipped, no gradient; min(-0.6065, -0.8): clipped, no gradient
        "ppo": ([-2.4, 0.8, -0.5], [0.0, 0.0, -0.5]),
        # -clip(r) * A * logprob, gradient -clip(r) * A
        "cispo": ([-1.2 * 2 * -0.5, -0.8 * -1 * -1.5, -1 * 0.5 * -1.0], [-2.4, 0.8, -0.5]),
    }
    for name, (losses, slopes) in expected.items():
        ours.grad = None
        result = LOSSES[name].tokens(ours, inputs, LOSSES[name].settings)
        result.sum().backward()
        assert result[0].tolist() == pytest.approx(losses)
        assert ours.grad is not None
        assert ours.grad[0].tolist() == pytest.approx(slopes)


def test_ppo_keeps_the_gradient_where_the_clip_does_not_bind() -> None:
    ours = torch.tensor([[-1.5, -0.5]], requires_grad=True)
    inputs = {"logprobs": torch.tensor([[-1.0, -1.0]]), "advantages": torch.tensor([[1.0, -1.0]])}
    inputs[MASK] = torch.tensor([[True, True]])
    LOSSES["ppo"].tokens(ours, inputs, LOSSES["ppo"].settings).sum().backward()
    assert ours.grad is not None
    assert ours.grad[0].tolist() == pytest.approx([-math.exp(-0.5), math.exp(0.5)])


def test_bfloat16_trains_float32_weights_to_nearly_the_same(random_model: Path) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 64, (4, 13))
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs={"target_tokens": ids[1:].astype(np.int64), "weights": np.ones(12, np.float32)},
        )
        for ids in rows
    ]
    exact = Trainer(AllWeights(load_model(random_model)))
    rounded = Trainer(AllWeights(load_model(random_model)), share_prefixes=True, compute_dtype=torch.bfloat16)
    losses = [
        t.forward_backward(data, "cross_entropy", None, backward=True).metrics["loss:sum"]
        for t in (exact, rounded)
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


def test_a_run_in_bfloat16_samples_and_trains_from_one_set_of_weights(
    random_model: Path, tmp_path: Path
) -> None:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path, dtype="bfloat16", seed=2) as engine:
        training = engine.create_training_client()
        client = training.save_weights_and_get_sampling_client().result()
        prompt = [5, 9, 3]
        params = tinker.SamplingParams(max_tokens=20, stop=[])
        (sampled,) = client.sample(tinker.ModelInput.from_ints(prompt), 1, params).result().sequences
        ids = np.array(prompt + sampled.tokens)
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)},
        )
        output = training.forward_backward([datum], "cross_entropy").result()
        trained = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]
        assert float(np.abs(trained - np.array(sampled.logprobs)).mean()) < 0.1
        training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()


def test_cross_entropy_returns_the_models_logprobs(engine: EmbeddedEngine, random_model: Path) -> None:
    ids = [3, 9, 27, 5]
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [0.0, 1.0, 2.0]},
    )
    output = engine.create_training_client().forward([datum], "cross_entropy").result()
    with torch.no_grad():
        logits = load_model(random_model)(input_ids=torch.tensor([ids])).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(output.loss_fn_outputs[0]["logprobs"].to_numpy(), expected, atol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(float(-(expected[1] + 2 * expected[2])), rel=1e-5)


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
        optimizer.step()
        assert (ours.optim_step(params).metrics or {})["grad_norm"] == pytest.approx(float(norm))
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


@pytest.mark.parametrize(
    ("loss_fn", "config", "keys", "message"),
    [
        ("dpo", None, {}, "loss_fn 'dpo' is not one of"),
        ("ppo", {"clip": 0.2}, {}, r"unknown keys \['clip'\]"),
        ("ppo", None, {"weights": [1.0] * 4}, "datum 0: ppo needs"),
        ("ppo", None, {"advantages": [1.0] * 3}, "datum 0: model_input has 4 tokens"),
        ("ppo", None, {"target_tokens": [1, 2, 3, 64]}, r"target_tokens has ids outside \[0, 64\)"),
    ],
)
def test_data_that_cannot_train_is_refused_by_name(
    engine: EmbeddedEngine,
    loss_fn: str,
    config: dict[str, float] | None,
    keys: dict[str, list[float]],
    message: str,
) -> None:
    inputs = {"target_tokens": [1, 2, 3, 4], "logprobs": [-1.0] * 4, "advantages": [1.0] * 4} | keys
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]), loss_fn_inputs=inputs)
    with pytest.raises(EngineError, match=message):
        engine.create_training_client().forward_backward([datum], loss_fn, config).result()


def test_a_step_with_a_gradient_that_is_not_finite_is_not_taken(engine: EmbeddedEngine) -> None:
    training = engine.create_training_client()
    before = training.save_weights_and_get_sampling_client().result()
    datum = rl_datum(4)
    datum.loss_fn_inputs["advantages"] = tinker.TensorData.from_numpy(np.full(4, np.nan, np.float32))
    training.forward_backward([datum], "importance_sampling").result()
    skipped = training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    assert skipped.metrics == {"skipped_steps": 1.0}
    after = training.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([5, 9, 33, 2])
    assert after.compute_logprobs(prompt).result() == before.compute_logprobs(prompt).result()
    again = training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    assert (again.metrics or {})["grad_norm"] == 0, "the gradient is gone with its step"


def test_a_checkpoint_name_cannot_leave_its_folder(engine: EmbeddedEngine) -> None:
    with pytest.raises(EngineError, match="must be a plain file name"):
        engine.create_training_client().save_state("../up").result()
