"""Loss values and gradients against Tinker's documented formulas, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from torch import Tensor

from tinkerscript.engine.checkpoint import load_model
from tinkerscript.engine.training import Trainer

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


FORMULAS: dict[str, Formula] = {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo}


CASES: list[tuple[str, tuple[float, float] | None]] = [
    ("importance_sampling", None),
    *((name, thresholds) for name in ("ppo", "cispo") for thresholds in (None, (0.7, 1.4), (0.0, 1.1))),
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
    trainer = Trainer(load_model(random_model))
    output = trainer.forward_backward(data, name, config, backward=True)
    assert output.metrics["loss:sum"] == pytest.approx(
        float(terms.sum()), abs=1e-5 * float(terms.abs().sum())
    )
    for mine, other in zip(trainer.model.parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        largest = float(other.grad.abs().max())
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-5 * max(1.0, largest), rtol=1e-5)
