"""Sequences that begin alike share a row: a token tree in which every distinct prefix is computed once.

A group's members have their prompt in common, and broken-off conversations of one episode have more. A row
holds the tree's tokens, each after its parent; attention is to oneself and one's ancestors, and a token's
position is its depth. So every token sees exactly what it would see in a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MAX_BRANCHING_TOKENS = 8192
"""Tokens of a row with branches at most. Its mask has an entry for every pair of them: 256 MiB in float32,
where the 16,384 tokens of a device's microbatch would take 1 GiB."""

PADDING_TOKENS = 256
"""Padding that costs about as much as one more forward and backward pass of a small model."""

PADDING_SHARE = 0.125
"""Padding beyond that, as a share of a batch's real tokens."""


@dataclass(slots=True)
class TokenTree:
    """One row: N tokens that belong to one sequence or more."""

    ids: Ints
    """[N] parents before children."""

    depths: Ints
    """[N] position in the sequences that a token belongs to."""

    paths: list[tuple[int, Ints]] = field(default_factory=lambda: list[tuple[int, Ints]]())
    """(index of the sequence, its tokens' places in the row [T])"""

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        """Whether plain causal attention is right."""
        return bool(self.depths[-1] == self.size - 1)

    def visible(self) -> NDArray[np.bool_]:
        """[N, N]: whether the token of a row of this matrix attends to that of a column."""
        seen = np.zeros((self.size, self.size), np.bool_)
        filled = 0
        for _, path in self.paths:
            own = path[path >= filled]
            if len(own):
                begin, end = int(own[0]), int(own[-1]) + 1
                seen[begin:end, path[: len(path) - len(own)]] = True
                seen[begin:end, begin:end] = np.tri(end - begin, dtype=np.bool_)
                filled = end
        return seen

    def grow(self, index: int, ids: Ints, shared: int) -> None:
        """Add a sequence whose first `shared` tokens are those of the newest one."""
        begin, new = self.size, len(ids) - shared
        start = self.paths[-1][1][:shared] if self.paths else np.empty(0, np.int64)
        self.paths.append((index, np.concatenate([start, np.arange(begin, begin + new)])))
        self.ids = np.concatenate([self.ids, ids[shared:]])
        self.depths = np.concatenate([self.depths, np.arange(shared, len(ids))])


def chain(index: int, ids: Ints) -> TokenTree:
    """One sequence in a row of its own."""
    tree = TokenTree(np.empty(0, np.int64), np.empty(0, np.int64))
    tree.grow(index, ids, 0)
    return tree


def token_trees(sequences: Sequence[Ints], *, pair_cost: float, budget: int) -> list[TokenTree]:
    """Rows over all `sequences` [T_i], most of them of at most `budget` tokens.

    A row without branches is as long as its longest sequence. One with branches may exceed `budget` up to
    twice its longest sequence, so that a group shares a prompt that nearly fills the budget by itself, but
    never `MAX_BRANCHING_TOKENS`.

    A tree pays attention for all pairs of its tokens; `pair_cost` is the cost of a pair, in the cost of a
    token's other operations. A sequence joins the tree before it in alphabetical order if that is cheaper.
    """
    trees: list[TokenTree] = []
    before: Ints | None = None
    # Big-endian bytes of ids sort as the ids do, and a prefix before what it is a prefix of.
    for index in sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">i8").tobytes()):
        ids = sequences[index]
        shared = 0 if before is None else common_prefix(before, ids)
        if shared and _joins(trees[-1], len(ids), shared, pair_cost, budget):
            trees[-1].grow(index, ids, shared)
        else:
            trees.append(chain(index, ids))
        before = ids
    return trees


def _joins(tree: TokenTree, length: int, shared: int, pair_cost: float, budget: int) -> bool:
    joined = tree.size + length - shared
    if tree.is_chain and tree.size == shared:
        return True  # It goes on where the only sequence so far ends, or is the same.
    longest = max(int(tree.depths.max()) + 1, length)
    if joined > tree.size and joined > min(max(budget, 2 * longest), MAX_BRANCHING_TOKENS):
        return False
    alone = _cost(tree.size, tree.is_chain, pair_cost) + _cost(length, True, pair_cost)
    return _cost(joined, False, pair_cost) <= alone


def _cost(tokens: int, is_chain: bool, pair_cost: float) -> float:
    return tokens + pair_cost * tokens**2 * (0.5 if is_chain else 1.0)


def common_prefix(one: Ints, other: Ints) -> int:
    """How many tokens two sequences begin with in common."""
    width = min(len(one), len(other))
    differing = np.flatnonzero(one[:width] != other[:width])
    return int(differing[0]) if len(differing) else width


def microbatches(trees: Sequence[TokenTree], budget: int) -> list[list[TokenTree]]:
    """Rows of similar size together, at most `budget` padded tokens each; chains and branching rows apart.

    The masks of branching rows that are together have at most `MAX_BRANCHING_TOKENS` ** 2 entries.
    """
    batches: list[list[TokenTree]] = []
    real = 0
    for tree in sorted(trees, key=lambda t: (t.is_chain, t.size)):
        # Sorted by size: the newest row is the widest of its batch.
        padded = (len(batches[-1]) + 1) * tree.size if batches else 0
        padding = padded - real - tree.size
        fits = batches and batches[-1][0].is_chain == tree.is_chain and padded <= budget
        fits = fits and (tree.is_chain or padded * tree.size <= MAX_BRANCHING_TOKENS**2)
        if fits and padding <= PADDING_TOKENS + PADDING_SHARE * real:
            batches[-1].append(tree)
            real += tree.size
        else:
            batches.append([tree])
            real = tree.size
    return batches
