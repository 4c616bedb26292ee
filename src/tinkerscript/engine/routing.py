"""`Routing`: the experts that a mixture's routers choose, recorded while sampling and replayed in training.

This is rollout routing replay (R3, Ma et al. 2025, arXiv:2510.11370; docs/models.md#mixtures-of-experts).
Every family selects with `topk` over one score per expert, so intercepting that call suits all.

Shapes: N tokens, L layers with a router, k experts of E for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

Selection = Callable[..., Any]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

UNKNOWN = 255
"""Every byte of an unrecorded choice."""

TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a model's routers choose, and so the layout of recorded bytes."""

    routers: tuple[str, ...]
    """Modules that call `topk`, in the order of computation."""

    number: int
    """Index among a router's `topk` calls; earlier ones choose groups of experts."""

    experts: int
    chosen: int

    @property
    def dtype(self) -> torch.dtype:
        """dtype of recorded ids. The largest number, or -1, stands for an unrecorded choice."""
        return torch.uint8 if self.experts < 256 else torch.int16

    @property
    def token_bytes(self) -> int:
        return len(self.routers) * self.chosen * self.dtype.itemsize

    @contextmanager
    def recorded(self, model: PreTrainedModel) -> Generator[list[Tensor]]:
        """Each layer's choices, int64 (N, k), in the forward passes of the context."""
        found: list[Tensor] = []

        def select(*args: Any, **kwargs: Any) -> Any:
            chosen = torch.topk(*args, **kwargs)
            found.append(chosen.indices.flatten(0, -2))
            return chosen

        with self._selecting(model, [select] * len(self.routers)):
            yield found

    @contextmanager
    def replayed(self, model: PreTrainedModel, ids: Tensor) -> Generator[None]:
        """Choose `ids` (N, L, k), or as usual where they are negative.

        Keep the context open during `backward`, which may compute layers again.
        """
        with self._selecting(model, [partial(_replay, each) for each in ids.unbind(1)]):
            yield

    @contextmanager
    def _selecting(self, model: PreTrainedModel, selections: Sequence[Selection]) -> Generator[None]:
        with ExitStack() as stack:
            for path, select in zip(self.routers, selections, strict=True):
                router = model.get_submodule(path)
                stack.enter_context(redirected(router, partial(_route, router, self.number, select)))
            yield

    # Bytes: uint8 [T, width] of one sequence

    def packed(self, choices: Tensor) -> NDArray[np.uint8]:
        """Ids (L, T, k) as bytes [T, L * k * itemsize]."""
        rows = choices.to(self.dtype).transpose(0, 1).flatten(1).contiguous().cpu().numpy()
        return rows.view(np.uint8)

    def unknown(self, tokens: int) -> NDArray[np.uint8]:
        return np.full((tokens, self.token_bytes), UNKNOWN, np.uint8)

    def unpacked(self, rows: NDArray[np.uint8]) -> NDArray[np.int16]:
        """Ids [T, L, k], -1 where unknown. Raises ValueError for bytes of another model."""
        if rows.ndim != 2 or rows.shape[1] != self.token_bytes:
            raise ValueError(
                f"recorded experts take {self.token_bytes} bytes per token here ({len(self.routers)} layers, "
                f"{self.chosen} of {self.experts} experts), and have the shape {list(rows.shape)}"
            )
        data = np.ascontiguousarray(rows)
        if self.dtype == torch.uint8:
            ids = data.astype(np.int16)
            ids[ids == UNKNOWN] = -1
        else:
            ids = data.view("<i2").astype(np.int16)
        if ids.min(initial=-1) < -1 or ids.max(initial=-1) >= self.experts:
            raise ValueError(f"recorded experts have ids outside [0, {self.experts})")
        shaped = ids.reshape(len(rows), len(self.routers), self.chosen)
        if ((shaped < 0).any(axis=(1, 2)) != (shaped < 0).all(axis=(1, 2))).any():
            raise ValueError("recorded experts are known for a part of a token's layers only")
        return shaped


def experts_of(config: PreTrainedConfig) -> int:
    text: Any = config.get_text_config()
    return next((found for name in _EXPERTS if (found := getattr(text, name, None))), 0)


@contextmanager
def redirected(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Run `forward` in a call of `module`, between its hooks, such as FSDP's."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def most_token_bytes(config: PreTrainedConfig) -> int:
    """Return an upper bound, as if all layers had a router."""
    text: Any = config.get_text_config()
    itemsize = 1 if experts_of(config) < 256 else 2
    return text.num_hidden_layers * getattr(text, "num_experts_per_tok", 0) * itemsize


class _Selecting(TorchFunctionMode):
    def __init__(self, number: int, select: Selection) -> None:
        super().__init__()
        self._before, self._select = number, select

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TOPK:
            self._before -= 1
            if self._before < 0:
                func = self._select
        return func(*args, **(kwargs or {}))


def _route(router: nn.Module, number: int, select: Selection, *args: Any, **kwargs: Any) -> Any:
    with _Selecting(number, select):
        return type(router).forward(router, *args, **kwargs)


def _replay(ids: Tensor, scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
    """ids (N, k) -> what `topk` returns, with the scores of these ids."""
    own = torch.topk(scores, k, *args, **kwargs)
    ids = ids.reshape(own.indices.shape)
    ids = torch.where(ids < 0, own.indices, ids.to(own.indices.dtype))
    return torch.return_types.topk((scores.gather(-1, ids), ids))
