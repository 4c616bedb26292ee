"""Loss values and gradients against Tinker's documented formulas; losses of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from torch import Tensor

from tinkerscript.engine.losses import LOSSES, SEQUENCE, Loss, resolve_loss
from tinkerscript.engine.training import AllWeights, Trainer
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import EngineError, EngineRequestError

Formula = Callable[[Tensor, Tensor, Tensor, float, float], Tensor]


def importance_sampling(ours: Tensor, theirs: Tensor, advantages: Tensor, *_: float) -> Tensor:
    return -(torch.exp(ours - theirs) * advantages)


def ppo(ours: Tensor, theirs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    ratio = torch.exp(ours - theirs)
    clipped = torch.clamp(ratio, low, high)
    return -torch.min(ratio * advantages, clipped * advantages)


def cispo(ours: Tensor, theirs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    clipped = torch.clamp(torch.exp(ours - theirs), low, high)
    return -(clipped.detach() * ours * advantages)


def gspo(ours: Tensor, theirs: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Of one sequence; what its tokens share is divided among those that train."""
    trains = advantages != 0
    ratio = torch.exp((ours - theirs)[trains].mean())
    terms = torch.min(ratio * advantages, torch.clamp(ratio, low, high) * advantages)
    return -terms / trains.sum()


FORMULAS: dict[str, Formula] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
}


CASES: list[tuple[str, tuple[float, float] | None]] = [
    ("importance_sampling", None),
    *(
        (name, thresholds)
        for name in ("ppo", "cispo", "gspo")
        for thresholds in (None, (0.7, 1.4), (0.0, 1.1))
    ),
]


@pytest.mark.parametrize(("name", "thresholds"), CASES)
def test_losses_and_gradients_equal_tinkers_formulas(
    random_model: Path, name: str, thresholds: tuple[float, float] | None
) -> None:
    """Six sequences, prompts without advantage; ratios on both sides of the clip. To 1e-5 of the terms."""
    torch.set_num_threads(1)
    random = np.random.default_rng(7)
    reference = load_model(random_model).double()
    data: list[tinker.Datum] = []
    losses: list[Tensor] = []
    low, high = thresholds or (0.8, 1.2)
    outside = 0
    for length in random.integers(4, 20, 6).tolist():
        ids = random.integers(2, 64, length + 1)
        logits = reference(torch.from_numpy(ids[None, :-1])).logits[0]
        ours = logits.log_softmax(-1)[torch.arange(length), torch.from_numpy(ids[1:])]
        theirs = (ours.detach().numpy() + random.normal(0, 0.4, length)).astype(np.float32)
        advantages = random.normal(size=length).astype(np.float32)
        advantages[: length // 3] = 0
        given = torch.from_numpy(theirs).double(), torch.from_numpy(advantages).double()
        losses.append(FORMULAS[name](ours, *given, low, high))
        ratio = np.exp(ours.detach().numpy() - theirs)
        outside += int(((ratio < low) | (ratio > high)).sum())
        inputs = {"target_tokens": ids[1:].astype(np.int64), "logprobs": theirs, "advantages": advantages}
        data.append(
            tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs)
        )
    assert outside > 5
    terms = torch.cat(losses)
    terms.sum().backward()
    terms = terms.detach()
    config = {"clip_low_threshold": low, "clip_high_threshold": high} if thresholds else None
    trainer = Trainer(AllWeights(load_model(random_model)))
    output = trainer.forward_backward(data, name, config, backward=True)
    assert output.metrics["loss:sum"] == pytest.approx(
        float(terms.sum()), abs=1e-5 * float(terms.abs().sum())
    )
    for mine, other in zip(trainer.model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        largest = float(other.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-5 * max(1.0, largest), rtol=1e-5)


def test_cross_entropy_falls_as_what_has_weight_gets_likelier() -> None:
    inputs = {"weights": torch.tensor([0.0, 1.0, 0.5])}
    losses = LOSSES["cross_entropy"].configured("cross_entropy", None)(
        torch.tensor([-3.0, -2.0, -1.0]), inputs
    )
    assert losses.tolist() == [0.0, 2.0, 0.5]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_token_without_advantage_may_have_any_logprob(name: str) -> None:
    ours = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-1e30, -2.5]), "advantages": torch.tensor([0.0, 1.0])}
    inputs[SEQUENCE] = torch.tensor([0, 0])
    losses = LOSSES[name].configured(name, None)(ours, inputs)
    losses.sum().backward()
    assert losses[0] == 0
    assert ours.grad is not None
    assert (float(ours.grad[0]), bool(ours.grad.isfinite().all())) == (0.0, True)


def scaled_likelihood(
    logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]
) -> Tensor:
    return -settings.get("scale", 1.0) * logprobs * inputs["advantages"]


def reduced(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return scaled_likelihood(logprobs, inputs, settings).sum()


SCALED = Loss(scaled_likelihood, settings={"scale": 2.0})
NO_TARGETS = Loss(scaled_likelihood, inputs=frozenset({"weights"}))


def rl_datum() -> tinker.Datum:
    inputs = {"target_tokens": np.array([3, 4]), "logprobs": np.ones(2), "advantages": np.ones(2)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([2, 3]),
        loss_fn_inputs={
            key: value.astype("f4" if value.dtype == float else "i8") for key, value in inputs.items()
        },
    )


def undeclared(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -settings["epsilon"] * inputs["advantages"] * logprobs


def test_a_setting_that_a_loss_does_not_declare_is_named(random_model: Path) -> None:
    trainer = Trainer(AllWeights(load_model(random_model)))
    with pytest.raises(EngineError, match=r"reads the setting 'epsilon', .*Loss\(function, settings="):
        trainer.forward_backward([rl_datum()], f"{__name__}:undeclared", None, backward=False)


def test_a_setting_that_is_text_is_refused(random_model: Path) -> None:
    trainer = Trainer(AllWeights(load_model(random_model)))
    with pytest.raises(EngineRequestError, match=r"clip_low_threshold must be a number, got '0\.8'"):
        trainer.forward_backward([rl_datum()], "ppo", {"clip_low_threshold": "0.8"}, backward=False)


def test_a_loss_of_the_users_own_trains_with_its_settings(random_model: Path) -> None:
    trainer = Trainer(AllWeights(load_model(random_model)))

    def loss(name: str, config: dict[str, float | str] | None = None) -> float:
        return trainer.forward_backward([rl_datum()], name, config, backward=False).metrics["loss:sum"]

    once = loss(f"{__name__}:scaled_likelihood")
    assert loss(f"{__name__}:SCALED") == pytest.approx(2 * once)
    assert loss(f"{__name__}:SCALED", {"scale": 3.0}) == pytest.approx(3 * once)
    with pytest.raises(EngineError, match=r"returned a tensor of shape \[\] .* loss of each token"):
        loss(f"{__name__}:reduced")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dro", "'dro' is not one of cross_entropy, .*; name a loss of your own as module:name"),
        ("nowhere:loss", "loss_fn: cannot import 'nowhere:loss': No module named 'nowhere'"),
        (f"{__name__}:nothing", "cannot import .* has no attribute 'nothing'"),
        (f"{__name__}:FORMULAS", "must be a function of per-token losses"),
        (f"{__name__}:NO_TARGETS", "whose inputs have target_tokens"),
    ],
)
def test_a_loss_that_cannot_be_resolved_is_refused(name: str, message: str) -> None:
    with pytest.raises(EngineRequestError, match=message):
        resolve_loss(name)


def test_the_table_is_tinkers_and_two_more() -> None:
    assert {name: sorted(loss.settings) for name, loss in LOSSES.items()} == {
        "cross_entropy": [],
        "importance_sampling": [],
        "ppo": ["clip_high_threshold", "clip_low_threshold"],
        "cispo": ["clip_high_threshold", "clip_low_threshold"],
        "gspo": ["clip_high_threshold", "clip_low_threshold"],
        "reverse_kl": [],
    }
