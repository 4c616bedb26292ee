"""Loss values and gradients against Tinker's documented formulas; losses of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from torch import Tensor

from tinkerscript.engine.losses import (
    LOSSES,
    MASK,
    SEQUENCE,
    TEMPERATURES,
    Loss,
    divergence_of_candidates,
    resolve_loss,
)
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
    """Tinker's, of one sequence, over the number of its tokens."""
    in_ratio = advantages != 0
    log_ratio = (ours.detach() - theirs)[in_ratio].mean()
    ratio = torch.exp(log_ratio + ours - ours.detach())
    clipped = torch.clamp(ratio, low, high)
    return -torch.min(ratio * advantages, clipped * advantages) / in_ratio.sum()


def dro(ours: Tensor, theirs: Tensor, advantages: Tensor, *_: float) -> Tensor:
    """Tinker's, at the tokens that train."""
    return -(ours * advantages - 0.5 * 0.05 * torch.where(advantages == 0, 0.0, ours - theirs) ** 2)


FORMULAS: dict[str, Formula] = {
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "dro": dro,
}


def test_the_divergence_over_candidates_takes_the_rest_as_one_token() -> None:
    """Over all tokens but one it is the whole divergence, with its gradient; over fewer at most that."""
    random = torch.Generator().manual_seed(4)
    logits, teacher = torch.randn(2, 5, 7, generator=random, dtype=torch.float64)
    logits.requires_grad_()
    p, t = logits.log_softmax(-1), teacher.log_softmax(-1)
    whole = (p.exp() * (p - t)).sum(-1)
    for number in (6, 3, 1):
        ids = t.topk(number).indices
        found = divergence_of_candidates(p.gather(-1, ids), t.gather(-1, ids))
        for row, chosen, value in zip(range(5), ids.tolist(), found.tolist(), strict=True):
            ours, theirs = p[row].exp().tolist(), t[row].exp().tolist()
            pairs = [(ours[i], theirs[i]) for i in chosen]
            pairs.append((1 - sum(a for a, _ in pairs), 1 - sum(b for _, b in pairs)))
            assert value == pytest.approx(sum(a * math.log(a / b) for a, b in pairs), abs=1e-6)
        assert (found < whole + 1e-9).all()
        if number == 6:
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-6)
            sums = found.sum(), whole.sum()
            slopes = [torch.autograd.grad(each, logits, retain_graph=True)[0] for each in sums]
            torch.testing.assert_close(*slopes, rtol=0, atol=1e-6)


@pytest.fixture
def trainer(random_model: Path) -> Trainer:
    return Trainer(AllWeights(load_model(random_model)))


def bounds(name: str, thresholds: tuple[float, float] | None = None) -> tuple[float, float]:
    return thresholds or ((1 - 3e-4, 1 + 4e-4) if name == "gspo" else (0.8, 1.2))


def policy_datum(ids: np.ndarray, **inputs: np.ndarray) -> tinker.Datum:
    """`inputs`: logprobs, advantages and more, of each of `ids` after the first."""
    tensors: dict[str, tinker.TensorData] = {"target_tokens": tinker.TensorData.from_numpy(ids[1:])}
    for name, values in inputs.items():
        tensors[name] = tinker.TensorData.from_numpy(np.asarray(values, np.float32))
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=tensors)


CASES: list[tuple[str, tuple[float, float] | None]] = [
    ("importance_sampling", None),
    ("dro", None),
    *(
        (name, thresholds)
        for name in ("ppo", "cispo", "gspo")
        for thresholds in (None, (0.7, 1.4), (0.0, 1.1))
    ),
]


MIXED = [[0.7] * 9, [1.0] * 4 + [1.3] * 4, [1.0] * 3 + [0.2, 0.7, 0.7, 1.0, 2.5], [1.0] * 6]
"""Temperatures of tokens; where sequences share a token, they may go on from it at different ones."""


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("name", "thresholds"), CASES)
def test_losses_and_gradients_equal_tinkers_formulas(
    random_model: Path,
    name: str,
    thresholds: tuple[float, float] | None,
    mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By plain torch in float64, to 1e-5 of the terms, in one chunk and in several. Sequences begin alike,
    their prompts have no advantage, and ratios are on both sides of the clip. `mixed`: each token trains at
    its own temperature, in rows that share what is alike."""
    torch.set_num_threads(1)
    random = np.random.default_rng(7)
    reference = load_model(random_model).double()
    begin = random.integers(2, 64, 5)
    data: list[tinker.Datum] = []
    losses: list[Tensor] = []
    expected: list[Tensor] = []
    low, high = bounds(name, thresholds)
    outside = 0
    for row in MIXED * 2:
        length = len(row)
        ids = np.append(begin, random.integers(2, 64, length - 4))
        temperatures = np.array(row if mixed else [1.0] * length, np.float32)
        logits = reference(torch.from_numpy(ids[None, :-1])).logits[0]
        probabilities = torch.softmax(logits / torch.from_numpy(temperatures).double()[:, None], -1)
        ours = probabilities[torch.arange(length), torch.from_numpy(ids[1:])].log()
        theirs = (ours.detach().numpy() + random.normal(0, 0.4, length)).astype(np.float32)
        advantages = random.normal(size=length).astype(np.float32)
        advantages[: length // 3] = 0
        given = torch.from_numpy(theirs).double(), torch.from_numpy(advantages).double()
        losses.append(FORMULAS[name](ours, *given, low, high))
        expected.append(ours.detach())
        ratio = np.exp(ours.detach().numpy() - theirs)
        outside += int(((ratio < low) | (ratio > high)).sum())
        more = {TEMPERATURES: temperatures} if mixed else {}
        data.append(policy_datum(ids, logprobs=theirs, advantages=advantages, **more))
    assert outside > 5
    terms = torch.cat(losses)
    terms.sum().backward()
    config = {"clip_low_threshold": low, "clip_high_threshold": high} if thresholds else None
    for chunk in (1000, 3):
        monkeypatch.setattr("tinkerscript.engine.losses.logits_rows", lambda *_, chunk=chunk: chunk)
        trainer = Trainer(AllWeights(load_model(random_model)), share_prefixes=mixed)
        output = trainer.forward_backward(data, name, config, backward=True)
        for found, ours in zip(output.loss_fn_outputs, expected, strict=True):
            np.testing.assert_allclose(found["logprobs"].to_numpy(), ours.numpy(), atol=1e-5)
        tolerance = 1e-5 * terms.abs().sum().item()
        assert output.metrics["loss:sum"] == pytest.approx(terms.sum().item(), abs=tolerance)
        for mine, other in zip(trainer.model.parameters(), reference.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            scale = max(1.0, float(other.grad.abs().max()))
            torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-5 * scale, rtol=1e-5)


def by_hand(
    name: str,
    ours: list[float],
    advantages: list[float],
    *,
    clip: bool = True,
    theirs: float = -1.0,
    mask: list[bool] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[float], list[float]]:
    """Losses and gradients of one sequence whose sampler gave the first token `theirs` and the others -1."""
    tensor = torch.tensor(ours, dtype=dtype, requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([theirs] + [-1.0] * (len(ours) - 1), dtype=dtype),
        "advantages": torch.tensor(advantages, dtype=dtype),
        SEQUENCE: torch.zeros(len(ours), dtype=torch.int64),
        MASK: torch.tensor(mask or [True] * len(ours)),
    }
    wide = None if clip else {"clip_low_threshold": 0.0, "clip_high_threshold": 1e9}
    losses = LOSSES[name].configured(name, wide)(tensor, inputs)
    losses.sum().backward()
    assert tensor.grad is not None
    return losses.tolist(), tensor.grad.tolist()


@pytest.mark.parametrize("name", FORMULAS)
def test_a_token_without_advantage_may_have_any_logprob(name: str) -> None:
    mask, dtype = [False, True], torch.float32
    losses, slopes = by_hand(name, [-1.0, -2.0], [0.0, 1.0], theirs=-1e30, mask=mask, dtype=dtype)
    assert (losses[0], slopes[0], math.isfinite(slopes[1])) == (0.0, 0.0, True)


def test_gspo_gives_each_token_the_gradient_of_its_own_advantage() -> None:
    """With one ratio for the whole sequence the advantages of 1 and -1 would cancel each other out."""
    assert by_hand("gspo", [-1.0, -1.0], [1.0, -1.0])[1] == pytest.approx([-0.5, 0.5])


def test_gspo_is_the_papers_where_all_tokens_have_one_advantage() -> None:
    ours, advantage = torch.tensor([-0.7, -1.4, -0.9], dtype=torch.float64, requires_grad=True), 0.6
    loss = -torch.exp((ours + 1.0).mean()) * advantage  # Equations 5 and 7, without a clip.
    loss.backward()
    assert ours.grad is not None
    losses, slopes = by_hand("gspo", ours.tolist(), [advantage] * 3, clip=False)
    assert (sum(losses), slopes) == (pytest.approx(loss.item()), pytest.approx(ours.grad.tolist()))


def test_a_trained_token_without_advantage_has_its_part_in_the_ratio_of_its_sequence() -> None:
    losses, _ = by_hand("gspo", [-1.0, -0.5], [1.0, 0.0], clip=False)
    assert losses == pytest.approx([-np.exp(0.25) / 2, 0.0])
    losses, _ = by_hand("gspo", [-1.0, -0.5], [1.0, 0.0], clip=False, mask=[True, False])
    assert losses == pytest.approx([-1.0, 0.0])


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("ours", [-1e4, 199.0])
def test_a_ratio_beyond_float32_leaves_the_gradient_finite(name: str, ours: float) -> None:
    """As verl, which clamps log-ratios to 20: an infinite ratio times a clipped gradient of 0 is NaN."""
    for advantage in (1.0, -1.0):
        losses, slopes = by_hand(name, [ours, -1.0], [advantage] * 2, dtype=torch.float32)
        assert np.isfinite([*losses, *slopes]).all()
        if name == "importance_sampling":
            assert losses[0] == pytest.approx(-advantage * np.exp(np.clip(ours + 1, -20, 20)), rel=1e-5)


def test_entropies_are_those_of_the_distributions_that_were_sampled_from(trainer: Trainer) -> None:
    zeros = np.zeros(8)
    given = {"logprobs": zeros, "advantages": zeros, TEMPERATURES: np.full(8, 0.5)}
    datum = policy_datum(np.arange(2, 11), **given)
    (row,) = trainer.forward_backward([datum], "ppo", None, backward=False).loss_fn_outputs
    logits = trainer.model(torch.tensor([datum.model_input.to_ints()])).logits[0]
    expected = torch.distributions.Categorical(logits=logits / 0.5).entropy()
    np.testing.assert_allclose(row["entropies"].to_numpy(), expected.detach().numpy(), atol=1e-5)


def test_a_temperature_of_zero_is_refused_by_name(trainer: Trainer) -> None:
    given = {"logprobs": np.zeros(2), "advantages": np.zeros(2), TEMPERATURES: np.array([1.0, 0.0])}
    datum = policy_datum(np.array([2, 3, 4]), **given)
    with pytest.raises(EngineRequestError, match=r"datum 0: loss_fn_inputs.temperatures must be above 0"):
        trainer.forward_backward([datum], "ppo", None, backward=False)


def confident(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """REINFORCE and a bonus for every token that trains, whatever its advantage."""
    del settings
    return -inputs["advantages"] * logprobs - inputs[MASK] * logprobs


def test_a_loss_sees_which_tokens_train(trainer: Trainer) -> None:
    nothing, mask = np.zeros(6), np.array([0, 0, 0, 0, 1, 1])
    for more, trained in (({}, []), ({MASK: mask}, [4, 5])):
        datum = policy_datum(np.arange(2, 9), logprobs=nothing, advantages=nothing, **more)
        output = trainer.forward_backward([datum], f"{__name__}:confident", None, backward=False)
        logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert output.metrics["loss:sum"] == pytest.approx(-float(logprobs[trained].sum()), rel=1e-5)


def scaled(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -settings.get("scale", 1.0) * logprobs * inputs["advantages"]


def reduced(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return scaled(logprobs, inputs, settings).sum()


SCALED = Loss(scaled, settings={"scale": 2.0})
NO_TARGETS = Loss(scaled, inputs=frozenset({"weights"}))


PLAIN = policy_datum(np.array([2, 3, 4]), logprobs=np.ones(2), advantages=np.ones(2))


def undeclared(logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    return -settings["epsilon"] * inputs["advantages"] * logprobs


@pytest.mark.parametrize(
    ("loss", "config", "said"),
    [
        (f"{__name__}:undeclared", None, r"reads the setting 'epsilon', .*Loss\(function, settings="),
        (f"{__name__}:reduced", None, r"returned a tensor of shape \[\] .* loss of each token"),
        ("ppo", {"clip_low_threshold": "0.8"}, r"clip_low_threshold must be a number, got '0\.8'"),
    ],
)
def test_a_loss_or_a_setting_that_does_not_fit_is_refused(
    trainer: Trainer, loss: str, config: dict[str, float | str] | None, said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        trainer.forward_backward([PLAIN], loss, config, backward=False)


def test_a_loss_of_the_users_own_trains_with_its_settings(trainer: Trainer) -> None:

    def loss(name: str, config: dict[str, float | str] | None = None) -> float:
        return trainer.forward_backward([PLAIN], name, config, backward=False).metrics["loss:sum"]

    once = loss(f"{__name__}:scaled")
    assert loss(f"{__name__}:SCALED") == pytest.approx(2 * once)
    assert loss(f"{__name__}:SCALED", {"scale": 3.0}) == pytest.approx(3 * once)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reinforce", "'reinforce' is not one of cross_entropy, .*; name a loss of your own as module:name"),
        ("nowhere:loss", "loss_fn: cannot import 'nowhere:loss': No module named 'nowhere'"),
        (f"{__name__}:nothing", "cannot import .* has no attribute 'nothing'"),
        (f"{__name__}:FORMULAS", "must be a function of per-token losses"),
        (f"{__name__}:NO_TARGETS", "whose inputs have target_tokens"),
    ],
)
def test_a_loss_that_cannot_be_resolved_is_refused(name: str, message: str) -> None:
    with pytest.raises(EngineRequestError, match=message):
        resolve_loss(name)
