"""`KVCache`: what the layers of a model keep of the rows that are being decoded.

A layer that attends keeps keys and values: one with a window those of its last tokens, in a ring, so that the
token at position p has place p modulo the window. A recurrent layer keeps a state (a convolution's last
inputs, a recurrence), which is that after a row's newest token and of no other.

Invariants: live rows are [0, n), so that a step reads views and never gathers. What is there stays if memory
runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer keeps of one row of P tokens."""

    keys: Tensor | None = None
    """(heads, P, width); of a layer with a window at most its last `window` positions."""

    values: Tensor | None = None
    """Like `keys`, but may be narrower (DeepSeek's multi-head latent attention)."""

    states: tuple[Tensor, ...] = ()
    """After the last token, of any shape."""

    window: int | None = None


RowState = Sequence[LayerState]
"""Layer by layer."""


@dataclass(slots=True)
class LayerCache:
    """The storage of one layer, whose rows and positions are those of `KVCache`, or more."""

    keys: Tensor
    """(rows, heads, positions, width); empty for a layer that does not attend."""

    values: Tensor
    states: list[Tensor]
    """(rows, ...)"""

    window: int | None

    def places(self, length: int) -> int:
        """How many of the first places `length` tokens fill."""
        return length if self.window is None else min(length, self.window)


@dataclass(slots=True)
class KVCache:
    """Storage that doubles when rows or lengths outgrow it."""

    layers: list[LayerCache] = field(default_factory=list[LayerCache])
    rows: int = 0
    length: int = 0
    """What fits into every layer: positions of rows. A layer has more if memory ran out after it grew."""

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has a state."""
        return any(layer.states for layer in self.layers)

    def reserve(self, rows: int, length: int, like: RowState | None = None) -> None:
        """Make room for `rows` rows of `length` tokens. `like` gives shapes and dtypes to an empty cache."""
        if rows <= self.rows and length <= self.length:
            return
        new_rows = max(rows, 2 * self.rows if rows > self.rows else self.rows)
        new_length = max(length, 2 * self.length if length > self.length else self.length)
        if not self.layers:
            assert like is not None
            self.layers = [_empty(state) for state in like]
        for layer in self.layers:  # One tensor after the other, so that one is held twice.
            places = layer.places(new_length)
            layer.keys = self._grown(layer, layer.keys, new_rows, places)
            layer.values = self._grown(layer, layer.values, new_rows, places)
            for index, states in enumerate(layer.states):
                new = states.new_zeros(new_rows, *states.shape[1:])
                new[: self.rows] = states[: self.rows]
                layer.states[index] = new
        self.rows, self.length = new_rows, new_length

    def _grown(self, layer: LayerCache, old: Tensor, rows: int, places: int) -> Tensor:
        _, heads, _, width = old.shape
        new = torch.zeros(rows, heads, places, width, dtype=old.dtype, device=old.device)
        filled = layer.places(self.length)
        new[: self.rows, :, :filled] = old[: self.rows, :, :filled]
        return new

    def put(self, row: int, state: RowState, length: int) -> None:
        """Write what a prefill of `length` tokens made into a row."""
        for layer, of_layer in zip(self.layers, state, strict=True):
            for stored, new in ((layer.keys, of_layer.keys), (layer.values, of_layer.values)):
                if new is not None:
                    places = layer.places(length)
                    turned = new[:, -places:]
                    if places < length:
                        turned = turned.roll(length % places, dims=1)
                    stored[row, :, :places] = turned
            for stored, new in zip(layer.states, of_layer.states, strict=True):
                stored[row] = new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row of `length` tokens over another."""
        for layer in self.layers:
            places = layer.places(length)
            for tensor in (layer.keys, layer.values):
                tensor[target, :, :places] = tensor[source, :, :places]
            for tensor in layer.states:
                tensor[target] = tensor[source]

    def copy_of(self, row: int, length: int, tokens: int) -> RowState | None:
        """What the layers kept of the first `tokens` of a row of `length`; None if they no longer have it."""
        if self.is_recurrent and tokens < length:
            return None
        if any(layer.places(length) < length for layer in self.layers) and tokens < length:
            return None
        return [self._copied(layer, row, tokens) for layer in self.layers]

    @staticmethod
    def _copied(layer: LayerCache, row: int, tokens: int) -> LayerState:
        keys, values = (
            tensor[row, :, : layer.places(tokens)].clone() for tensor in (layer.keys, layer.values)
        )
        if layer.places(tokens) < tokens:
            keys, values = (each.roll(-(tokens % each.shape[1]), dims=1) for each in (keys, values))
        return LayerState(keys, values, tuple(state[row].clone() for state in layer.states), layer.window)


def _empty(state: LayerState) -> LayerCache:
    def none(like: Tensor | None) -> Tensor:
        if like is None:
            return torch.empty(0, 0, 0, 0)
        return like.new_empty(0, like.shape[0], 0, like.shape[2])

    states = [each.new_empty(0, *each.shape) for each in state.states]
    return LayerCache(none(state.keys), none(state.values), states, state.window)
