"""`KVCache`: what a model's layers keep of the rows being decoded, within a `CacheBudget`.

A layer keeps keys and values (with a window the last ones, position p in place p modulo the window) or one
recurrent state. Rows of similar length share dense storage (`RowGroup`), so a step reads views instead of
copying the cache. The live rows of a group are [0, n). Running out of memory loses nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

GROUPED_TOKENS = 256


PLACES = 64
"""Storage grows by this many tokens, so that copying stays cheap next to attention."""


@dataclass(frozen=True, slots=True)
class LayerState:
    keys: Tensor | None = None
    """(heads, P, width); with a window, at most its last `window` positions."""

    values: Tensor | None = None
    """May be narrower (DeepSeek's multi-head latent attention)."""

    states: tuple[Tensor, ...] = ()
    window: int | None = None

    @property
    def can_be_cut(self) -> bool:
        """Whether a prefix's keys and values suffice to continue from it."""
        return self.window is None and not self.states

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.keys, self.values, *self.states) if each is not None]


RowState = Sequence[LayerState]


def cut(state: RowState, begin: int, end: int | None = None) -> RowState:
    """Copy positions [begin, end) of layers that can be cut, and all positions of the others."""

    def part(layer: LayerState, kept: Tensor | None) -> Tensor | None:
        return None if kept is None else (kept[:, begin:end] if layer.can_be_cut else kept).clone()

    return [
        LayerState(
            part(layer, layer.keys),
            part(layer, layer.values),
            tuple(each.clone() for each in layer.states),
            layer.window,
        )
        for layer in state
    ]


def joined(parts: Sequence[RowState]) -> RowState:
    if len(parts) == 1:
        return parts[0]
    return [_joined(layers) if layers[-1].can_be_cut else layers[-1] for layers in zip(*parts, strict=True)]


def _joined(parts: Sequence[LayerState]) -> LayerState:
    return LayerState(_cat([part.keys for part in parts]), _cat([part.values for part in parts]))


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [each for each in tensors if each is not None]
    return torch.cat(there, dim=1) if there else None


class HoldsBytes(Protocol):
    @property
    def bytes(self) -> int: ...


class Evicts(Protocol):
    @property
    def oldest(self) -> int | None:
        """Return the last use, by the budget's clock, of what `evict` would drop; None: nothing."""
        ...

    def evict(self) -> None: ...


class CacheBudget:
    """Not thread-safe."""

    def __init__(self, total: float = math.inf) -> None:
        self.total = total
        self.clock = itertools.count()
        # Weak, so that an old version's caches go with it.
        self.holders: WeakSet[HoldsBytes] = WeakSet()
        self.stores: WeakSet[Evicts] = WeakSet()

    def has_room(self, more: int) -> bool:
        """Whether `more` bytes fit, after evicting the least recently used."""
        while self.total < math.inf and sum(each.bytes for each in self.holders) + more > self.total:
            kept = [(oldest, store) for store in self.stores if (oldest := store.oldest) is not None]
            if not kept:
                return False
            min(kept, key=lambda each: each[0])[1].evict()
        return True


@dataclass(slots=True)
class LayerCache:
    keys: Tensor
    """(rows, heads, positions, width); empty without attention."""

    values: Tensor
    states: list[Tensor]
    """(rows, ...)"""

    window: int | None

    def places(self, length: int) -> int:
        return length if self.window is None else min(length, self.window)

    def row_bytes(self, length: int) -> int:
        attended = sum(each.itemsize * each.shape[1] * each.shape[3] for each in (self.keys, self.values))
        states = sum(each.itemsize * math.prod(each.shape[1:]) for each in self.states)
        return attended * self.places(length) + states


Row = TypeVar("Row")

_STORAGES = itertools.count(1)


@dataclass(slots=True, eq=False)
class RowGroup(Generic[Row]):
    limit: int
    layers: list[LayerCache]
    rows: list[Row] = field(default_factory=list[Row])
    lengths: list[int] = field(default_factory=list[int])
    room_for_rows: int = 0
    room_for_tokens: int = 0
    """Fits into every layer."""

    bytes: int = 0
    storage: int = 0
    """Unique in the process; changes with the tensors."""

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        """Return the storage for `rows` rows of `length` tokens.

        It stays the same if they fit. Else it is just enough, or half as many rows again if rows join one by
        one.
        """
        if rows <= self.room_for_rows and length <= self.room_for_tokens:
            return self.room_for_rows, self.room_for_tokens
        if rows > self.room_for_rows:
            rows = max(rows, self.room_for_rows * 3 // 2)
        elif 2 * rows > self.room_for_rows:
            rows = self.room_for_rows
        return rows, _rounded(max(length, self.room_for_tokens))

    def reserve(self, rows: int, length: int) -> None:
        self._resize(*self.shape(rows, length))

    def shrink(self) -> None:
        self._resize(len(self.rows), min(_rounded(self.longest + 1), self.room_for_tokens))

    def _resize(self, rows: int, length: int) -> None:
        if (rows, length) == (self.room_for_rows, self.room_for_tokens):
            return
        self.storage = next(_STORAGES)
        self.room_for_rows, self.room_for_tokens = (
            min(rows, self.room_for_rows),
            min(length, self.room_for_tokens),
        )
        for layer in self.layers:  # One at a time, so that only one tensor exists twice.
            places = layer.places(length)
            layer.keys = self._resized(layer, layer.keys, rows, places)
            layer.values = self._resized(layer, layer.values, rows, places)
            for index, states in enumerate(layer.states):
                new = states.new_zeros(rows, *states.shape[1:])
                new[: len(self.rows)] = states[: len(self.rows)]
                layer.states[index] = new
        self.room_for_rows, self.room_for_tokens = rows, length
        self.bytes = rows * sum(layer.row_bytes(length) for layer in self.layers)

    def _resized(self, layer: LayerCache, old: Tensor, rows: int, places: int) -> Tensor:
        _, heads, _, width = old.shape
        new = torch.zeros(rows, heads, places, width, dtype=old.dtype, device=old.device)
        live, filled = len(self.rows), layer.places(self.longest)
        new[:live, :, :filled] = old[:live, :, :filled]
        return new

    def add(self, rows: Sequence[Row], state: RowState, length: int) -> None:
        first, end = len(self.rows), len(self.rows) + len(rows)
        for layer, of_layer in zip(self.layers, state, strict=True):
            for stored, new in ((layer.keys, of_layer.keys), (layer.values, of_layer.values)):
                if new is None:
                    continue
                if new.shape[1] == length == layer.places(length):
                    stored[first:end, :, :length] = new
                else:  # A prefill's ring may lack a token: the next one takes its place.
                    known = min(new.shape[1], layer.places(length))
                    ring = torch.arange(length - known, length, device=new.device) % layer.places(length)
                    stored[first:end, :, ring] = new[:, -known:]
            for stored, new in zip(layer.states, of_layer.states, strict=True):
                stored[first:end] = new
        self.rows += rows
        self.lengths += [length] * len(rows)

    def remove(self, index: int) -> None:
        """The last row takes its place."""
        last = len(self.rows) - 1
        if index != last:
            for layer in self.layers:
                places = layer.places(self.lengths[last])
                for tensor in (layer.keys, layer.values):
                    tensor[index, :, :places] = tensor[last, :, :places]
                for tensor in layer.states:
                    tensor[index] = tensor[last]
            self.rows[index], self.lengths[index] = self.rows[last], self.lengths[last]
        self.rows.pop()
        self.lengths.pop()

    def state(self, index: int, begin: int = 0) -> RowState:
        """Copy a row's state, from position `begin` on where it can be cut."""
        return [self._layer_state(layer, index, begin) for layer in self.layers]

    def _layer_state(self, layer: LayerCache, index: int, begin: int) -> LayerState:
        length = self.lengths[index]
        places = layer.places(length)
        first = begin if layer.window is None and not layer.states else 0
        keys, values = (each[index, :, first:places].clone() for each in (layer.keys, layer.values))
        if places < length:
            keys, values = (each.roll(-(length % places), dims=1) for each in (keys, values))
        states = tuple(state[index].clone() for state in layer.states)
        attends = layer.keys.shape[1] > 0
        return LayerState(keys if attends else None, values if attends else None, states, layer.window)


class KVCache(Generic[Row]):
    def __init__(self, budget: CacheBudget | None = None, spread: float = 2) -> None:
        self._spread = spread
        self.groups: list[RowGroup[Row]] = []
        self._budget = budget or CacheBudget()
        self._budget.holders.add(self)
        self._layers: list[LayerCache] = []

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]

    @property
    def lengths(self) -> list[int]:
        return [length for group in self.groups for length in group.lengths]

    @property
    def is_recurrent(self) -> bool:
        return any(layer.states for layer in self._layers)

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)

    def row_bytes(self, length: int) -> int:
        return sum(layer.row_bytes(length) for layer in self._layers)

    def clear(self) -> None:
        """Drop all rows, because a failure may leave storage half grown."""
        self.groups = []

    def fit(self, lengths: Sequence[int], like: RowState) -> int:
        """Return how many of the first rows fit, with their next tokens."""
        self._know(like)
        for count in range(len(lengths), 0, -1):
            joining = self._joining(lengths[:count])
            if self._has_room(lambda joining=joining: sum(self._growth(*each) for each in joining)):
                return count
        return 0

    def reserve(self, lengths: Sequence[int], like: RowState) -> None:
        self._know(like)
        for group, rows, longest in self._joining(lengths):
            if group not in self.groups:
                self.groups.append(group)
            group.reserve(rows, longest)

    def add(self, rows: Sequence[Row], state: RowState, length: int) -> None:
        self.reserve([length] * len(rows), state)
        self._group(group_limit(length + 1, self._spread)).add(rows, state, length)

    def _know(self, like: RowState) -> None:
        self._layers = self._layers or [_empty(state) for state in like]

    def _group(self, limit: int) -> RowGroup[Row]:
        for group in self.groups:
            if group.limit == limit:
                return group
        return RowGroup(limit, [replace(layer, states=list(layer.states)) for layer in self._layers])

    def _joining(self, lengths: Sequence[int]) -> list[tuple[RowGroup[Row], int, int]]:
        joining: dict[int, list[int]] = {}
        for length in lengths:
            joining.setdefault(group_limit(length + 1, self._spread), []).append(length + 1)
        groups = [(self._group(limit), of_group) for limit, of_group in joining.items()]
        return [(group, len(group.rows) + len(of_group), max(of_group)) for group, of_group in groups]

    def _growth(self, group: RowGroup[Row], rows: int, length: int) -> int:
        rows, length = group.shape(rows, length)
        return rows * self.row_bytes(length) - group.bytes

    def grow(self) -> bool:
        """Make room for every row's next token. Return False if some rows must leave."""
        return all(
            self._grow(group)
            for group in list(self.groups)
            if not group.rows or group.longest == group.room_for_tokens
        )

    def _grow(self, group: RowGroup[Row]) -> bool:
        pairs = zip(group.rows, group.lengths, strict=True)
        longer = [row for row, length in pairs if length == group.limit]
        wider = group_limit(group.limit + 1, self._spread)
        if longer and len(longer) == len(group.rows) and all(each.limit != wider for each in self.groups):
            group.limit = wider  # Nobody has to move.
        elif longer:
            lengths = [group.limit] * len(longer)
            if self.fit(lengths, ()) < len(longer):
                return False
            self.reserve(lengths, ())
            for row in longer:
                index = group.rows.index(row)
                self.add([row], group.state(index), group.limit)
                group.remove(index)
        if not group.rows:
            self.groups.remove(group)
        elif group.longest == group.room_for_tokens:
            rows, length = len(group.rows), group.longest + 1
            if not self._has_room(partial(self._growth, group, rows, length)):
                return False
            group.reserve(rows, length)
        return True

    def advance(self) -> None:
        for group in self.groups:
            group.lengths = [length + 1 for length in group.lengths]

    def _has_room(self, more: Callable[[], int]) -> bool:
        if self._budget.has_room(more()):
            return True
        with suppress(RuntimeError):
            for group in self.groups:
                group.shrink()
        return self._budget.has_room(more())

    def remove(self, row: Row) -> None:
        group, index = self._place(row)
        group.remove(index)
        if not group.rows:
            self.groups.remove(group)

    def state(self, row: Row, begin: int = 0) -> RowState:
        group, index = self._place(row)
        return group.state(index, begin)

    def last_layer(self, row: Row, begin: int) -> Tensor | None:
        """The keys of a row's last layer from `begin` on; None if the row is not here."""
        if row not in self.rows:
            return None
        group, index = self._place(row)
        return group.layers[-1].keys[index, :, begin : group.lengths[index]]

    def _place(self, row: Row) -> tuple[RowGroup[Row], int]:
        return next((group, group.rows.index(row)) for group in self.groups if row in group.rows)


@cache
def group_limit(length: int, spread: float) -> int:
    limit = GROUPED_TOKENS
    while limit < length:
        limit = _rounded(spread * limit)
    return limit


def stored_tokens(lengths: Sequence[int], spread: float) -> int:
    groups: dict[int, list[int]] = {}
    for length in lengths:
        groups.setdefault(group_limit(length, spread), []).append(length)
    return sum(len(of_group) * _rounded(max(of_group)) for of_group in groups.values())


def _rounded(length: float) -> int:
    return math.ceil(length / PLACES) * PLACES


def _empty(state: LayerState) -> LayerCache:
    def none(like: Tensor | None) -> Tensor:
        if like is None:
            return torch.empty(0, 0, 0, 0)
        return like.new_empty(0, like.shape[0], 0, like.shape[2])

    states = [each.new_empty(0, *each.shape) for each in state.states]
    return LayerCache(none(state.keys), none(state.values), states, state.window)
