"""Products of float32 matrices with oneDNN: on an AMD EPYC, torch's default, MKL, takes twice as long."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_WORK = 2**20
"""Multiplications from which oneDNN is faster, except for one row: a call takes 10 us."""


@cache
def mkl_is_slow() -> bool:
    info = Path("/proc/cpuinfo")
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and info.exists()
        and "GenuineIntel" not in info.read_text()
    )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, in), weight (out, in) -> (N, out). Not differentiable: see `Linear`."""
    if _suits(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)


def sum_with_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y (N, out) + x (N, in) @ weight (in, out)."""
    return y + product(x, weight.t()) if _suits(x, weight.t()) else torch.addmm(y, x, weight)


def _suits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and len(x) > 1
        and x.numel() * len(weight) >= LEAST_WORK
        and mkl_is_slow()
    )


class Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        if not _suits(rows, self.weight) or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        found: Any = _Product.apply(rows, self.weight)
        found = found.view(*input.shape[:-1], self.out_features)
        bias: Any = self.bias
        return found if bias is None else found + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return product(x, weight)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        return (
            product(gradient, weight.t()) if ctx.needs_input_grad[0] else None,
            product(gradient.t(), x.t()) if ctx.needs_input_grad[1] else None,
        )


def speed_up(model: nn.Module) -> None:
    if mkl_is_slow():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
