"""What training refuses, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.training import AllWeights, EmbeddedTrainingClient, Trainer
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import EngineError, EngineRequestError

ADAM = tinker.AdamParams(learning_rate=0.1)
PROMPT = tinker.ModelInput.from_ints([5, 9, 33, 2])


def datum(length: int, **inputs: Any) -> tinker.Datum:
    """`length` positions of cross entropy; `inputs` take the place of its inputs."""
    ids = np.random.default_rng(length).integers(0, 64, length + 1)
    given = {"target_tokens": ids[1:], "weights": np.ones(length, np.float32)} | inputs
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=given)


def trainer_of(folder: Path, **settings: Any) -> Trainer:
    return Trainer(AllWeights(load_model(folder)), **settings)


@pytest.fixture
def trainer(random_model: Path) -> Trainer:
    return trainer_of(random_model)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("weights", np.ones((1, 4), np.float32), r"shape \[1, 4\]"),
        ("weights", np.float32(1.0).reshape(()), r"shape \[\]"),
        ("target_tokens", np.ones((4, 1), np.int64), r"shape \[4, 1\]"),
        ("target_tokens", np.ones(4, np.float32), "float32"),
    ],
)
def test_inputs_of_another_shape_or_type_are_refused(
    trainer: Trainer, name: str, value: np.ndarray, found: str
) -> None:
    """They would broadcast to every pair of positions."""
    data = [datum(4), datum(4, **{name: tinker.TensorData.from_numpy(value)})]
    with pytest.raises(EngineRequestError, match=rf"datum 1: .*loss_fn_inputs\.{name} .*{found}"):
        trainer.forward_backward(data, "cross_entropy", None, backward=True)


def test_a_text_that_fills_the_context_trains_and_a_longer_one_is_refused(trainer: Trainer) -> None:
    # 47 and 48 tokens that the model reads: texts of 48 and, the last token as a target alone, 49.
    trainer.forward_backward([datum(47), datum(48)], "cross_entropy", None, backward=True)
    with pytest.raises(EngineRequestError, match="datum 1: model_input has 49 tokens; the context holds 48"):
        trainer.forward_backward([datum(3), datum(49)], "cross_entropy", None, backward=False)


def failing_on(model: Any, call: int) -> Callable[[], None]:
    """Let the model's forward pass number `call` (from 1) fail; returns what mends it."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise RuntimeError("out of memory")

    return model.register_forward_pre_hook(hook).remove


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def one_step(trainer: Trainer) -> list[torch.Tensor]:
    trainer.forward_backward([datum(9)], "cross_entropy", None, backward=True)
    trainer.optim_step(ADAM)
    return weights(trainer)


def test_no_step_is_taken_over_a_part_of_what_was_asked(engine: EmbeddedEngine, random_model: Path) -> None:
    """Everything is queued before anything fails, as `optimizer_step` does."""
    trainer = trainer_of(random_model, microbatch_tokens=20)
    mend = failing_on(trainer.model, 3)
    before = weights(trainer)
    training = EmbeddedTrainingClient(engine.context, trainer, engine.checkpoint_dir)
    first = training.forward_backward([datum(9)], "cross_entropy")
    failed = training.forward_backward([datum(9), datum(17)], "cross_entropy")
    later = training.forward_backward([datum(9)], "cross_entropy")
    step = training.optim_step(ADAM)
    first.result(timeout=10)
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.result(timeout=10)
    later.result(timeout=10)
    with pytest.raises(EngineError, match=r"step was not taken.*out of memory"):
        step.result(timeout=10)
    mend()
    for mine, old in zip(weights(trainer), before, strict=True):
        torch.testing.assert_close(mine, old, rtol=0, atol=0)
    fresh = trainer_of(random_model, microbatch_tokens=20)
    for mine, other in zip(one_step(trainer), one_step(fresh), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_request_that_is_refused_changes_nothing(random_model: Path, trainer: Trainer) -> None:
    fresh = trainer_of(random_model)
    trainer.forward_backward([datum(9)], "cross_entropy", None, backward=True)
    with pytest.raises(EngineRequestError):
        trainer.forward_backward([datum(5), datum(4, weights=[1.0])], "cross_entropy", None, backward=True)
    trainer.optim_step(ADAM)
    for mine, other in zip(weights(trainer), one_step(fresh), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_a_failure_without_gradients_stops_no_step(trainer: Trainer) -> None:
    failing_on(trainer.model, 2)
    trainer.forward_backward([datum(9)], "cross_entropy", None, backward=True)
    with pytest.raises(RuntimeError):
        trainer.forward_backward([datum(9)], "cross_entropy", None, backward=False)
    assert (trainer.optim_step(ADAM).metrics or {})["grad_norm"] > 0


def test_loading_weights_forgets_gradients_and_failures(engine: EmbeddedEngine, trainer: Trainer) -> None:
    failing_on(trainer.model, 2)
    training = EmbeddedTrainingClient(engine.context, trainer, engine.checkpoint_dir)
    path = training.save_state("here").result().path
    training.forward_backward([datum(9)], "cross_entropy").result()
    training.load_state(path).result()
    assert (training.optim_step(ADAM).result().metrics or {})["grad_norm"] == 0
    with pytest.raises(RuntimeError):
        training.forward_backward([datum(9)], "cross_entropy").result()
    training.load_state(path).result()
    training.optim_step(ADAM).result()


def test_a_checkpoint_without_optimizer_state_changes_no_weights(
    engine: EmbeddedEngine, tmp_path: Path
) -> None:
    training = engine.create_training_client()
    training.save_to(tmp_path / "sampling", optimizer=False, notes={}).result()
    training.forward_backward([datum(9)], "cross_entropy").result()
    training.optim_step(ADAM).result()

    def logprobs() -> list[float | None]:
        client = training.save_weights_and_get_sampling_client().result()
        return client.compute_logprobs(PROMPT).result()

    before = logprobs()
    with pytest.raises(EngineError, match=r"has no optimizer\.pt"):
        training.load_state_with_optimizer(tmp_path / "sampling").result()
    assert logprobs() == before
    training.load_state(tmp_path / "sampling").result()
    assert logprobs() != before


def test_a_gradient_that_is_not_finite_spoils_no_later_step(random_model: Path, trainer: Trainer) -> None:
    fresh = trainer_of(random_model)
    spoiled = datum(9, weights=tinker.TensorData.from_numpy(np.full(9, np.inf, np.float32)))
    trainer.forward_backward([spoiled], "cross_entropy", None, backward=True)
    assert trainer.optim_step(ADAM).metrics == {"skipped_steps": 1.0}
    for mine, other in zip(one_step(trainer), one_step(fresh), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
