"""`KVCache`: keys and values of the rows that decode together.

Rows [0, n) are live and contiguous, so a step reads views and never gathers. Shapes per layer are
(rows, kv_heads, length, head_dim); what lies beyond a row's own length is never attended to.

What `HubDecoder` needs from the Hugging Face cache interface: one cache that writes into our rows.

`PromptCache`: prefilled prompts of one set of weights, so that a group's prompt is computed once.

The members of a group ask for the same prompt within milliseconds, but seldom in the same step. Least
recently used prompts go first; the bound is in tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin


class KVCache:
    """Static storage that doubles when rows or lengths outgrow it."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def rows(self) -> int:
        """Rows that fit."""
        return self.keys[0].shape[0] if self.keys else 0

    @property
    def length(self) -> int:
        """Positions that fit."""
        return self.keys[0].shape[2] if self.keys else 0

    def reserve(self, rows: int, length: int, like: list[Tensor]) -> None:
        """Make room for `rows` rows of `length` positions.

        `like`, per layer (..., kv_heads, positions, head_dim), gives heads, head size and type.
        """
        if self.keys and rows <= self.rows and length <= self.length:
            return
        new_rows = max(rows, 2 * self.rows if rows > self.rows else self.rows)
        new_length = max(length, 2 * self.length if length > self.length else self.length)
        self.keys = [self._grown(self.keys, i, k, new_rows, new_length) for i, k in enumerate(like)]
        self.values = [self._grown(self.values, i, k, new_rows, new_length) for i, k in enumerate(like)]

    @staticmethod
    def _grown(old: list[Tensor], index: int, like: Tensor, rows: int, length: int) -> Tensor:
        heads, _, size = like.shape[-3:]
        new = torch.zeros(rows, heads, length, size, dtype=like.dtype, device=like.device)
        if old:
            new[: old[index].shape[0], :, : old[index].shape[2]] = old[index]
        return new

    def put(self, row: int, keys: list[Tensor], values: list[Tensor]) -> None:
        """Write a prefilled prompt into a row: keys, values per layer (kv_heads, P, head_dim)."""
        length = keys[0].shape[1]
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            self.keys[layer][row, :, :length] = k
            self.values[layer][row, :, :length] = v

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one row over another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]


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


Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What decoding needs of a prompt of P tokens."""

    logits: Tensor
    """(V,): after the last token."""

    keys: list[Tensor]
    """Per layer (kv_heads, P, head_dim)."""

    values: list[Tensor]
    """Per layer (kv_heads, P, head_dim)."""


class PromptCache:
    """Keeps at most `max_tokens` prompt tokens. Not thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._prompts: OrderedDict[Prompt, Prefilled] = OrderedDict()

    def get(self, prompt: Prompt) -> Prefilled | None:
        found = self._prompts.get(prompt)
        if found is not None:
            self._prompts.move_to_end(prompt)
        return found

    def missing(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of `prompts` that are not here, each once."""
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prompts]

    def put(self, prompt: Prompt, prefilled: Prefilled) -> None:
        self._prompts[prompt] = prefilled
        self._tokens += len(prompt)

    def trim(self) -> None:
        """Forget the least recently used prompts until the bound holds."""
        while self._tokens > self._max_tokens:
            prompt, _ = self._prompts.popitem(last=False)
            self._tokens -= len(prompt)
