"""A frozen base in 8 or 4 bits, under adapters in float32.

Sampler and trainer share the stored weights. Each product dequantizes them, so a row's result does not depend
on the other rows, as it would with quantized activations.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinkerscript.engine.products import product
from tinkerscript.errors import EngineError

Quantization = Literal["none", "int8", "nf4"]

BITS: dict[Quantization, float] = {"int8": 8.0, "nf4": 4.5}
"""Bits per weight, with the scales of nf4's blocks."""

ROUTERS = ("gate", "router")

_BLOCK = 64


class QuantizedLinear(nn.Linear):
    """`weight`: int8 (out, in), or packed by bitsandbytes. As a buffer, it is never trained or converted."""

    def __init__(self, linear: nn.Linear, kind: Quantization, device: torch.device) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        del self.weight
        weight = linear.weight.detach().to(device)
        self.bias = linear.bias
        self._dtype = weight.dtype
        self._kind = kind
        stored, scale = _int8(weight) if kind == "int8" else _nf4(weight)
        self.register_buffer("weight", stored, persistent=False)
        self.register_buffer("scale", scale, persistent=False)

    def dequantized(self) -> Tensor:
        """(out, in), in the dtype of the model's weights."""
        stored: Any = self.weight
        scale: Any = self.scale
        if self._kind == "int8":
            return stored.to(self._dtype).mul_(scale.to(self._dtype))
        bnb = _bitsandbytes()
        shape = torch.Size((self.out_features, self.in_features))
        state = bnb.QuantState(scale, shape=shape, blocksize=_BLOCK, quant_type="nf4", dtype=self._dtype)
        return bnb.dequantize_4bit(stored, state)

    def forward(self, input: Tensor) -> Tensor:
        found: Any = _Product.apply(input.reshape(-1, self.in_features), self)
        found = found.view(*input.shape[:-1], self.out_features)
        bias: Any = self.bias
        return found if bias is None else found + bias


class _Product(torch.autograd.Function):
    """Dequantizes again for backward: all layers' weights in memory would be the whole base."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        return product(x, linear.dequantized())

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        return product(gradient, ctx.linear.dequantized().t()), None


def quantize(model: PreTrainedModel, kind: Quantization, device: torch.device) -> None:
    modules = linear_modules(model)
    if not modules:
        raise EngineError(
            f"engine.quantization: a model of type {model.config.model_type!r} has no linear modules to "
            "quantize; leave it out"
        )
    for path in modules:
        owner, _, name = path.rpartition(".")
        linear: Any = model.get_submodule(path)
        setattr(model.get_submodule(owner), name, QuantizedLinear(linear, kind, device))


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Paths of the language model's linear modules, without head and routers."""
    text: Any = model.get_decoder()
    inside, head = set(text.modules()), model.get_output_embeddings()
    return [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear
        and module in inside
        and module is not head
        and path.rpartition(".")[2] not in ROUTERS
    ]


def is_quantized(model: PreTrainedModel) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def weight_of(linear: Any) -> Tensor:
    return linear.dequantized() if isinstance(linear, QuantizedLinear) else linear.weight


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A scale per output: (out, in), (out, 1)."""
    scale = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (weight.float() / scale).round_().to(torch.int8), scale


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    stored, state = _bitsandbytes().quantize_4bit(
        weight, blocksize=_BLOCK, compress_statistics=False, quant_type="nf4"
    )
    return stored, state.absmax


def _bitsandbytes() -> Any:
    try:
        # An extra.
        from bitsandbytes import functional  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise EngineError(
            "engine.quantization: nf4 needs bitsandbytes: pip install 'tinkerscript[quantized]', or set int8"
        ) from error
    return functional
