"""Keys and values: `KVCache` of the rows that decode together, `PromptCache` of recent prompts.

Invariant: live rows are [0, n) and contiguous, so that a step reads views and never gathers. Tensors are
(rows, kv_heads, length, head_dim) per layer; attention never reaches beyond a row's own length.

The members of a group ask for the same prompt within milliseconds, but seldom in the same step, so prefilled
prompts are kept: up to a number of tokens, the least recently used evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Prompt = tuple[int, ...]


class KVCache:
    """Storage that doubles when rows or lengths outgrow it."""

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

        `like`, per layer (..., kv_heads, positions, head_dim), gives heads, head size and dtype.
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
    """Prefilled prompts of one set of weights, `max_tokens` in all. Not thread-safe."""

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
        """The `prompts` that are not cached, without duplicates."""
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prompts]

    def put(self, prompt: Prompt, prefilled: Prefilled) -> None:
        self._prompts[prompt] = prefilled
        self._tokens += len(prompt)

    def trim(self) -> None:
        """Evict the least recently used prompts until at most `max_tokens` are left."""
        while self._tokens > self._max_tokens:
            prompt, _ = self._prompts.popitem(last=False)
            self._tokens -= len(prompt)
