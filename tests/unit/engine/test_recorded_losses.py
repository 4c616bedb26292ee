"""Losses and their terms on a recorded batch, against the papers' formulas written out token by token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from recorded_batch import Array, recorded_batch
from tinkerscript.engine.losses import (
    COVARIANT,
    ENTROPY,
    LOSSES,
    MASK,
    SAMPLER,
    SCALE,
    SEQUENCE,
    START,
    Loss,
    resolve_loss,
)
from tinkerscript.errors import EngineError, EngineRequestError

BATCH = recorded_batch()
MASKED = BATCH.mask
SCALED = 1 / 7
"""What the terms without advantage are multiplied by."""


def advantages() -> Array:
    """float64 [E, R]: each reward minus its group's mean, over the group's deviation."""
    found = np.zeros(MASKED.shape)
    for number in np.unique(BATCH.group):
        of = BATCH.group == number
        rewards = BATCH.rewards[of]
        found[of] = ((rewards - rewards.mean()) / rewards.std(ddof=1))[:, None]
    return found


def inputs() -> dict[str, Tensor]:
    """Of all trained tokens, one after the other."""
    arrays = {
        "logprobs": BATCH.old,
        "advantages": advantages(),
        SCALE: np.full(MASKED.shape, SCALED),
        START: BATCH.sampler,
        SAMPLER: BATCH.sampler,
        ENTROPY: BATCH.entropies,
        COVARIANT: (np.arange(MASKED.size).reshape(MASKED.shape) % 5 == 0).astype(float),
        SEQUENCE: np.arange(len(MASKED))[:, None].repeat(MASKED.shape[1], 1),
        MASK: MASKED,
    }
    return {name: torch.from_numpy(array[MASKED].copy()) for name, array in arrays.items()}


def computed(loss: str, **settings: float) -> tuple[Array, Array]:
    """The loss of each token, and the gradient of their sum."""
    logprobs = torch.from_numpy(BATCH.new[MASKED].copy()).requires_grad_()
    losses = LOSSES[loss].configured(loss, settings)(logprobs, inputs())
    losses.sum().backward()
    assert logprobs.grad is not None
    return losses.detach().numpy(), logprobs.grad.numpy()


Formula = Callable[[Tensor, float, float], Tensor]
"""(log probability under the policy, under the old one, advantage) -> loss of the token"""


def by_token(formula: Formula) -> tuple[Array, Array]:
    given = inputs()
    news = [value.clone().requires_grad_() for value in torch.from_numpy(BATCH.new[MASKED].copy())]
    others = given["logprobs"].tolist(), given["advantages"].tolist()
    losses = [formula(*each) for each in zip(news, *others, strict=True)]
    torch.stack(losses).sum().backward()
    gradients = [0.0 if new.grad is None else float(new.grad) for new in news]
    return torch.stack(losses).detach().numpy(), np.array(gradients)


def ppo(new: Tensor, old: float, advantage: float) -> Tensor:
    """-min(r A, clip(r) A), which is a constant where the clip decides."""
    ratio = (new - old).exp()
    inside = min(max(ratio.item(), 0.8), 1.2)
    is_clipped = inside * advantage < ratio.item() * advantage
    return (0 * ratio - inside * advantage) if is_clipped else -ratio * advantage


def dual_clip(new: Tensor, old: float, advantage: float) -> Tensor:
    """max(min(r A, clip(r) A), c A) where A < 0; equation 5 of Ye et al., with c = 1.1."""
    loss = ppo(new, old, advantage)
    return loss if advantage >= 0 or loss.item() < -1.1 * advantage else 0 * new - 1.1 * advantage


def dppo_tv(new: Tensor, old: float, advantage: float) -> Tensor:
    """M = 0 where the ratio is beyond 1 on the advantage's side and |p - q| > delta; equations 11 to 13."""
    p, q = new.exp().item(), float(np.exp(old))
    beyond = p > q if advantage > 0 else p < q
    kept = not (beyond and abs(p - q) > 0.05 and advantage != 0)
    return -float(kept) * (new - old).exp() * advantage


def dppo_kl(new: Tensor, old: float, advantage: float) -> Tensor:
    """The same with D(q || p) of Bernoulli distributions; equation 14."""
    p, q = new.exp().item(), float(np.exp(old))
    rest = 0.0 if q == 1 else (1 - q) * np.log((1 - q) / (1 - p))
    beyond = p > q if advantage > 0 else p < q
    kept = not (beyond and q * np.log(q / p) + rest > 0.005 and advantage != 0)
    return -float(kept) * (new - old).exp() * advantage


def sapo(new: Tensor, old: float, advantage: float) -> Tensor:
    """f(r) = sigmoid(tau (r - 1)) 4 / tau; equations 5 and 6."""
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau / (1 + torch.exp(-tau * ((new - old).exp() - 1))) * advantage


FORMULAS: dict[str, tuple[Formula, dict[str, float]]] = {
    "ppo_dual_clip": (dual_clip, {"dual_clip": 1.1}),
    "dppo_tv": (dppo_tv, {"delta_low": 0.05, "delta_high": 0.05}),
    "dppo_kl": (dppo_kl, {"delta_low": 0.005, "delta_high": 0.005}),
    "sapo": (sapo, {}),
}


@pytest.mark.parametrize("loss", FORMULAS)
def test_a_loss_is_its_papers_on_a_recorded_batch(loss: str) -> None:
    formula, settings = FORMULAS[loss]
    losses, gradients = computed(loss, **settings)
    expected, slopes = by_token(formula)
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    np.testing.assert_allclose(gradients, slopes, atol=1e-6)
    plain = by_token(lambda new, old, advantage: -(new - old).exp() * advantage)[1]
    assert (abs(slopes - plain) > 1e-9).sum() > 5, "the clip, mask or gate acts on this batch"


def test_covariant_tokens_are_left_out_or_held_back() -> None:
    given = inputs()
    chosen = given[COVARIANT].numpy() > 0
    clipped, plain = computed("clip_cov"), computed("ppo")
    for found, of_ppo in zip(clipped, plain, strict=True):
        np.testing.assert_allclose(found, np.where(chosen, 0.0, of_ppo), atol=1e-12)
    held, free = computed("kl_cov", kl=0.5), computed("importance_sampling")
    moved = BATCH.new[MASKED] - BATCH.old[MASKED]
    np.testing.assert_allclose(held[0] - free[0], chosen * 0.5 * abs(moved) * SCALED, atol=1e-12)
    np.testing.assert_allclose(held[1] - free[1], chosen * 0.5 * np.sign(moved) * SCALED, atol=1e-12)


ESTIMATES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "kl_k1": lambda new, start, _: new - start,
    "kl_k2": lambda new, start, _: 0.5 * (new - start) ** 2,
    "kl_k3": lambda new, start, _: torch.exp(start - new) - (start - new) - 1,
    "kl_unbiased": lambda new, start, old: (
        torch.exp(new - old) * (torch.exp(start - new) - (start - new) - 1)
    ),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_the_divergence_from_the_start_is_added_to_any_loss(name: str) -> None:
    starts = iter(BATCH.sampler[MASKED].tolist())

    def formula(new: Tensor, old: float, advantage: float) -> Tensor:
        return ppo(new, old, advantage) + 0.3 * SCALED * ESTIMATES[name](new, next(starts), old)

    for found, expected in zip(computed("ppo", **{name: 0.3}), by_token(formula), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    without = {key: value for key, value in inputs().items() if key != START}
    configured = LOSSES["ppo"].configured("ppo", {name: 0.3})
    with pytest.raises(EngineError, match=rf"loss_fn_config\.{name} needs the loss_fn_input start_logprobs"):
        configured(without["logprobs"], without)


def test_the_gradient_of_the_unbiased_divergence_is_that_of_the_divergence() -> None:
    """Over every token of a vocabulary, weighed by the old probabilities; k3 alone has another gradient."""
    random = np.random.default_rng(1)
    logits = torch.from_numpy(random.normal(size=6)).requires_grad_()
    old, start = (torch.from_numpy(random.normal(size=6)).log_softmax(-1) for _ in range(2))
    whole = (logits.softmax(-1) * (logits.log_softmax(-1) - start)).sum()
    (exact,) = torch.autograd.grad(whole, logits)
    found = dict[str, Tensor]()
    for name in ("kl_unbiased", "kl_k3"):
        logprobs = logits.log_softmax(-1)
        given = {"logprobs": old, "advantages": torch.zeros_like(old), START: start}
        given |= {MASK: torch.ones(6, dtype=torch.bool), SEQUENCE: torch.zeros(6, dtype=torch.int64)}
        losses = LOSSES["ppo"].configured("ppo", {name: 1.0})(logprobs, given)
        (found[name],) = torch.autograd.grad((old.exp() * losses).sum(), logits)
    torch.testing.assert_close(found["kl_unbiased"], exact)
    assert (found["kl_k3"] - exact).abs().max() > 0.01


def test_the_entropy_is_subtracted_with_its_gradient() -> None:
    given = inputs()
    entropies = given[ENTROPY].requires_grad_()
    configured = LOSSES["ppo"].configured("ppo", {"entropy": 0.2})
    assert configured.needs_entropy
    losses = configured(torch.from_numpy(BATCH.new[MASKED].copy()), given)
    losses.sum().backward()
    expected = computed("ppo")[0] - 0.2 * SCALED * entropies.detach().numpy()
    np.testing.assert_allclose(losses.detach().numpy(), expected, atol=1e-12)
    assert entropies.grad is not None
    np.testing.assert_allclose(entropies.grad.numpy(), -0.2 * SCALED)


def test_off_policy_sequences_lose_their_negative_advantages() -> None:
    """DeepSeek-V3.2, equation 9: mean(log(sampler / policy)) > delta, and an advantage below 0."""
    drifts = [
        float(np.mean(sampler[:length] - new[:length]))
        for sampler, new, length in zip(BATCH.sampler, BATCH.new, BATCH.lengths, strict=True)
    ]
    delta = float(np.median(drifts))
    kept = np.array(
        [
            advantage >= 0 or drifts[at] <= delta
            for at, row in enumerate(advantages())
            for advantage in row[: BATCH.lengths[at]]
        ]
    )
    assert 0.1 < kept.mean() < 0.9
    for found, whole in zip(computed("ppo", off_policy_mask=delta), computed("ppo"), strict=True):
        np.testing.assert_allclose(found, np.where(kept, whole, 0.0), atol=1e-12)


TAKEN = Loss(lambda logprobs, *_: logprobs, settings={"entropy": 1.0})


def test_a_loss_may_not_take_the_name_of_a_term() -> None:
    with pytest.raises(EngineRequestError, match="declares the setting 'entropy', which every policy loss"):
        resolve_loss(f"{__name__}:TAKEN")
