"""`KVCache`: keys and values of the rows that decode together.

Rows [0, n) are live and contiguous, so a step reads views and never gathers. Shapes per layer are
(rows, kv_heads, length, head_dim); what lies beyond a row's own length is never attended to.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
