"""What `HubDecoder` needs from the Hugging Face cache interface: one cache that writes into our rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from tinkerscript.engine.kv_cache import KVCache


class SlotLayer(CacheLayerMixin):
    """One layer of `KVCache` for one step: writes position lengths[i] of row i, returns [0, longest]."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, lengths: Tensor, longest: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self._lengths, self._longest = lengths, longest
        self._rows = torch.arange(len(lengths), device=keys.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Storage exists from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """States (n, kv_heads, 1, D) -> all keys and values (n, kv_heads, longest + 1, D)."""
        assert self.keys is not None
        assert self.values is not None
        n, end = len(self._rows), self._longest + 1
        self.keys[self._rows, :, self._lengths] = key_states[:, :, 0]
        self.values[self._rows, :, self._lengths] = value_states[:, :, 0]
        return self.keys[:n, :, :end], self.values[:n, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._longest + query_length, 0

    def get_seq_length(self) -> int:
        return self._longest

    def get_max_cache_shape(self) -> int:
        return -1


class SlotCache(Cache):
    """A Hugging Face cache over the rows of a `KVCache`, for one decoding step."""

    def __init__(self, cache: KVCache, lengths: Tensor, longest: int) -> None:
        layers = [
            SlotLayer(keys, values, lengths, longest)
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        super().__init__(layers=layers)  # pyright: ignore[reportArgumentType]


def prefill_cache(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """ids (B, P) right-padded -> logits (B, P, V), keys and values: per layer (B, kv_heads, P, D)."""
    cache = DynamicCache()
    output: Any = model(input_ids=ids, past_key_values=cache, use_cache=True)
    layers: list[Any] = list(cache.layers)
    return output.logits, [layer.keys for layer in layers], [layer.values for layer in layers]
