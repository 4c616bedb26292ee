"""Products by oneDNN: equal to torch's own, also their gradients, and without more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_models import small_model
from tinkerscript.engine import products


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that oneDNN was given, on any processor and for small products too."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    used: list[tuple[int, ...]] = []
    whole = torch.ops.mkldnn._linear_pointwise

    def watched(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        used.append(tuple(weight.shape))
        return whole(x, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    return used


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_and_a_sum_are_those_of_float64(onednn: list[Any], transposed: bool) -> None:
    x, y = drawn(7, 40), drawn(7, 24, seed=1)
    weight = drawn(40, 24, seed=2).t() if transposed else drawn(24, 40, seed=2)
    wanted = x.double() @ weight.double().t()
    torch.testing.assert_close(products.product(x, weight).double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        products.sum_with_product(y, x, weight.t()).double(), y.double() + wanted, atol=1e-5, rtol=1e-5
    )
    assert onednn == [(24, 40)] * 2


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_has_torchs_gradients(onednn: list[Any], trains: bool, bias: bool, summed: bool) -> None:
    layer = nn.Linear(40, 24, bias=bias).requires_grad_(trains)
    x = drawn(3, 5, 40).requires_grad_()
    # A sum's gradient has strides of 0.
    gradient = drawn(1).expand(3, 5, 24) if summed else drawn(3, 5, 24, seed=1)
    plain = torch.autograd.grad(F.linear(x, layer.weight, layer.bias), [x, *layer_weights(layer)], gradient)
    products.speed_up(nn.Sequential(layer))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        found = layer(x)
    for one, other in zip(
        torch.autograd.grad(found, [x, *layer_weights(layer)], gradient), plain, strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert (24, 40) in onednn
    assert len(onednn) == 2 + trains
    if not trains:
        assert [each.shape for each in saved] == [layer.weight.shape], "a frozen layer keeps no input"


def layer_weights(layer: nn.Linear) -> list[Tensor]:
    return [each for each in layer.parameters() if each.requires_grad]


@pytest.mark.parametrize("case", ["one row", "small", "autocast", "float64"])
def test_other_products_are_torchs(onednn: list[Any], monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    layer, x = nn.Linear(8, 8), drawn(1 if case == "one row" else 4, 8)
    if case == "small":
        monkeypatch.setattr(products, "LEAST_WORK", 4 * 8 * 8 + 1)
    if case == "float64":
        layer, x = layer.double(), x.double()
    products.speed_up(nn.Sequential(layer))
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=0, atol=0)
    assert not onednn


def test_a_model_computes_as_before(onednn: list[Any]) -> None:
    model = small_model("Qwen3", num_key_value_heads=2)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        products.speed_up(model)
        after = model(ids).logits
    assert len(onednn) == sum(isinstance(each, products.Linear) for each in model.modules()) > 7
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
