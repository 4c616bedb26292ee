"""DPO on pairs of episodes: the loss, and a gradient that `cross_entropy` computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker_cookbook.preference.train_dpo import compute_dpo_loss

from tinkerscript.train.chats import SupervisedExample
from tinkerscript.train.dpo import Dpo, PairLosses

RANDOM = np.random.default_rng(3)


def datum(*ids: int, trained: int) -> tinker.Datum:
    """A sequence whose last tokens train, `trained` of them."""
    weights = np.zeros(len(ids) - 1, np.float32)
    weights[len(weights) - trained :] = 1
    inputs: Any = {"target_tokens": np.array(ids[1:]), "weights": weights}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(ids[:-1])), loss_fn_inputs=inputs)


def test_losses_and_margins_are_the_cookbooks() -> None:
    better, worse = RANDOM.normal(size=(2, 7)) * 20
    found = PairLosses.of(better, worse, 0.1)
    zero = torch.zeros(())
    one, two = (list(torch.from_numpy(each)) for each in (better, worse))
    loss, metrics = compute_dpo_loss(one, two, [zero] * 7, [zero] * 7, 0.1)
    assert found.metrics == pytest.approx(
        {"loss": float(loss), "margin": metrics["margin"], "accuracy": metrics["accuracy"]}
    )


def test_margins_that_no_float_holds_have_a_finite_gradient() -> None:
    found = PairLosses.of(np.array([1e6, -1e6]), np.zeros(2), 1.0)
    assert found.losses.tolist() == [0.0, 1e6]
    assert found.slopes.tolist() == [0.0, -0.5]


PAIRS = [
    SupervisedExample(
        [datum(1, 2, 3, trained=1), datum(1, 4, 5, 6, trained=2)], 1, [datum(1, 2, 9, 9, trained=2)]
    ),
    SupervisedExample([datum(7, 8, 9, trained=2)], 2, [datum(7, 1, trained=1), datum(7, 7, 7, trained=1)]),
]
DATUMS = [datum for pair in PAIRS for datum in pair.datums]
POLICY, START = ([RANDOM.normal(-2, 1, each.model_input.length) for each in DATUMS] for _ in range(2))


class Client:
    """Answers `forward` with POLICY."""

    async def forward(self, data: list[tinker.Datum], loss_fn: str, config: object = None) -> Any:
        assert (data, loss_fn) == (DATUMS, "cross_entropy")
        rows = [{"logprobs": tinker.TensorData.from_numpy(row)} for row in POLICY]
        return SimpleNamespace(loss_fn_outputs=rows)


async def start(sequences: list[Any], temperatures: list[Any]) -> list[Any]:
    assert {float(value) for each in temperatures for value in each} == {1.0}
    assert [each.tolist() for each in sequences[:2]] == [[1, 2, 3], [1, 4, 5, 6]]
    return [np.append(0.0, row) for row in START]


async def test_the_weights_of_tokens_are_the_derivatives_of_the_loss() -> None:
    """-log sigmoid(beta (h(better) - h(worse))), where the log probabilities of several sequences add up."""
    client: Any = Client()
    found, metrics = await Dpo(start, 0.3).weighted(PAIRS, client)
    rows = [torch.from_numpy(row).requires_grad_() for row in POLICY]
    weights = [torch.from_numpy(each.loss_fn_inputs["weights"].to_numpy()).double() for each in DATUMS]
    moved = [((r - torch.from_numpy(s)) * w).sum() for r, s, w in zip(rows, START, weights, strict=True)]
    margins = torch.stack([moved[0] + moved[1] - moved[2], moved[3] - moved[4] - moved[5]])
    loss = -torch.nn.functional.logsigmoid(0.3 * margins).mean()
    loss.backward()
    for each, row in zip(found, rows, strict=True):
        assert row.grad is not None
        np.testing.assert_allclose(-each.loss_fn_inputs["weights"].to_numpy(), row.grad.numpy(), atol=1e-7)
    assert metrics["loss"] == pytest.approx(float(loss.detach()))
    better = [0, 1, 3]
    nll = -sum(float((rows[i].detach() * weights[i]).sum()) for i in better) / 5
    assert metrics["nll"] == pytest.approx(nll)
