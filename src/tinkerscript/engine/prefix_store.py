"""`PrefixStore`: states of computed texts, for later requests with the same prefix.

A store has one version of the weights and one adapter (docs/engine.md#shared-computation).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import ref

from torch import Tensor

from tinkerscript.engine.kv_cache import CacheBudget, LayerState, RowState, cut, joined

Ids = tuple[int, ...]

WORTH_TOKENS = 64
"""Shorter prefixes are cheaper to compute again in a batch, unless a text ends there."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    logits: Tensor
    """(V,): after the last token."""

    state: RowState


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Node:
    ids: Ids
    state: RowState
    """Keys and values of `ids`; if a text ends here, also the other layers' states."""

    weak_parent: ref[_Node] | None
    """Weak, so that a store's memory goes with the store and not at the next garbage collection."""

    is_end: bool
    logits: Tensor | None = None
    children: dict[int, _Node] = field(default_factory=dict[int, "_Node"])
    used: int = 0
    bytes: int = 0

    @property
    def parent(self) -> _Node:
        parent = self.weak_parent and self.weak_parent()
        assert parent is not None, "the store holds the root"
        return parent


class PrefixStore:
    def __init__(self, budget: CacheBudget) -> None:
        self.bytes = 0
        self._budget = budget
        self._root = _Node((), [], None, is_end=False)
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        """Least recently used first, children before their parents."""

        self._can_be_cut = True
        budget.holders.add(self)
        budget.stores.add(self)

    @property
    def oldest(self) -> int | None:
        return next(iter(self._nodes)).used if self._nodes else None

    def evict(self) -> None:
        node, _ = self._nodes.popitem(last=False)
        assert not node.children
        del node.parent.children[node.ids[0]]
        self.bytes -= node.bytes

    def complete(self, ids: Ids) -> Prefilled | None:
        path, found = self._walk(ids)
        if found < len(ids) or _over(path, found) or path[-1].logits is None:
            return None
        self._touch(path)
        return Prefilled(path[-1].logits, joined([node.state for node in path]))

    def worth(self, ids: Ids) -> int:
        return self._usable(ids)[1]

    def longest(self, ids: Ids) -> tuple[int, RowState | None]:
        """Return the length and state of the prefix to continue from, or (0, None)."""
        path, length = self._usable(ids)
        if not path:
            return 0, None
        self._touch(path)
        parts = [node.state for node in path]
        if over := _over(path, length):
            parts[-1] = cut(parts[-1], 0, len(path[-1].ids) - over)
        return length, joined(parts)

    def keep(self, ids: Ids, read: Callable[[int], RowState], logits: Tensor | None = None) -> None:
        """`read` copies the text's state from a position on."""
        with suppress(RuntimeError):  # Out of memory: it is computed again later.
            self._keep(ids, read, logits)

    def _keep(self, ids: Ids, read: Callable[[int], RowState], logits: Tensor | None) -> None:
        path, found = self._walk(ids)
        self._touch(path)
        over = _over(path, found)
        if found < len(ids) or over or not path[-1].is_end:
            state = read(found)
            if not self._budget.has_room(sum(each.nbytes for layer in state for each in layer.tensors)):
                return
            if path and path[-1] not in self._nodes:
                return  # Evicted meanwhile.
            self._can_be_cut = all(layer.can_be_cut for layer in state)
            if over:
                path[-1] = self._split(path[-1], len(path[-1].ids) - over)
            if found < len(ids):
                parent = path[-1] if path else self._root
                path.append(_Node(ids[found:], state, ref(parent), is_end=True))
                self._attach(path[-1])
            else:
                path[-1].state = joined([path[-1].state, state])
        path[-1].is_end = True
        if logits is not None:
            path[-1].logits = logits.clone()  # A view would keep the whole batch.
        self._weigh(path[-1])
        self._touch(path)

    def _walk(self, ids: Ids) -> tuple[list[_Node], int]:
        """Return the nodes along `ids`, and the common length, which may end within the last node."""
        path: list[_Node] = []
        node, found = self._root, 0
        while found < len(ids) and (child := node.children.get(ids[found])) is not None:
            path.append(child)
            common = common_length(child.ids, ids[found : found + len(child.ids)])
            found += common
            if common < len(child.ids):
                break
            node = child
        return path, found

    def _usable(self, ids: Ids) -> tuple[list[_Node], int]:
        path, found = self._walk(ids)
        over = _over(path, found)
        ends = [at for at, node in enumerate(path) if node.is_end and not (over and at == len(path) - 1)]
        if self._can_be_cut and (ends or found >= WORTH_TOKENS):
            return path, found
        path = path[: ends[-1] + 1] if ends and not self._can_be_cut else []
        return path, sum(len(node.ids) for node in path)

    def _split(self, node: _Node, at: int) -> _Node:
        state = _without_ends(cut(node.state, 0, at))
        upper = _Node(node.ids[:at], state, node.weak_parent, is_end=False)
        node.ids, node.state, node.weak_parent = node.ids[at:], cut(node.state, at), ref(upper)
        upper.children[node.ids[0]] = node
        self._attach(upper)
        self._weigh(node)
        return upper

    def _attach(self, node: _Node) -> None:
        node.parent.children[node.ids[0]] = node
        self._nodes[node] = None
        self._weigh(node)

    def _weigh(self, node: _Node) -> None:
        tensors = [each for layer in node.state for each in layer.tensors]
        size = sum(each.nbytes for each in [*tensors, *([] if node.logits is None else [node.logits])])
        self.bytes += size - node.bytes
        node.bytes = size

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            node.used = next(self._budget.clock)
            self._nodes.move_to_end(node)


def _over(path: list[_Node], found: int) -> int:
    return sum(len(node.ids) for node in path) - found


def common_length(ids: Ids, others: Ids) -> int:
    if ids == others:
        return len(ids)
    shorter = min(len(ids), len(others))
    return next(
        (at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), shorter
    )


def _without_ends(state: RowState) -> RowState:
    return [layer if layer.can_be_cut else LayerState(window=layer.window) for layer in state]
