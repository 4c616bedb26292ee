"""Training rows: sequences with a common prefix share a row, in which every distinct prefix is computed once.

The members of a group share their prompt, and forked conversations of one episode share more. A row is a
token tree: each token comes after its parent, attends to itself and its ancestors, and has its depth as its
position.

Invariant: every token sees exactly what it would see in a row of its own. `shares_prefixes` proves it for a
model before its rows are shared.

Shapes: B rows of at most N tokens. S sequence positions in all, one sequence after another; a token that
several sequences share is in several of the S positions and computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tinkerscript.engine.decoder import FORWARD_ERRORS

Ints = NDArray[np.int64]

MAX_BRANCHING_TOKENS = 8192
"""Most tokens of a row with branches. Its mask has an entry per pair of them: 256 MiB in float32, where the
16,384 tokens of a device's microbatch would take 1 GiB."""

PADDING_TOKENS = 256
"""Padding that costs about as much as one more forward and backward pass of a small model."""

PADDING_SHARE = 0.125
"""Padding beyond that, as a share of a batch's real tokens."""

PROOF_FLOOR, PROOF_FACTOR = 1e-5, 20.0
"""A packed row's log probabilities may differ from those of plain rows by the floor plus this many times what
the shape of the batch alone changes."""


@dataclass(slots=True)
class TokenTree:
    """One row: N tokens, each of one sequence or more."""

    ids: Ints
    """[N] parents before children."""

    depths: Ints
    """[N] each token's position in its sequences."""

    paths: list[tuple[int, Ints]] = field(default_factory=list[tuple[int, Ints]])
    """(index of a sequence, places [T] of its tokens in the row)"""

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        """Whether the row has no branches, so that causal attention is right."""
        return bool(self.depths[-1] == self.size - 1)

    def visible(self) -> NDArray[np.bool_]:
        """[N, N]: whether the token of the matrix's row attends to the token of its column."""
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
        """Add a sequence whose first `shared` tokens are those of the sequence added last."""
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

    A row without branches is as long as its longest sequence. One with branches may exceed `budget`, up to
    twice its longest sequence, so that a group can share a prompt that alone nearly fills the budget; but
    never `MAX_BRANCHING_TOKENS`.

    A tree computes attention for all pairs of its tokens; `pair_cost` is the cost of one pair relative to
    that of a token's other operations. A sequence joins the tree before it, in the order of ids, if that is
    cheaper.
    """
    trees: list[TokenTree] = []
    before: Ints | None = None
    # Big-endian bytes sort as the ids do, and a prefix sorts before what it is a prefix of.
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
        return True  # It equals or continues the only sequence so far.
    longest = max(int(tree.depths.max()) + 1, length)
    if joined > tree.size and joined > min(max(budget, 2 * longest), MAX_BRANCHING_TOKENS):
        return False
    alone = _cost(tree.size, tree.is_chain, pair_cost) + _cost(length, True, pair_cost)
    return _cost(joined, False, pair_cost) <= alone


def _cost(tokens: int, is_chain: bool, pair_cost: float) -> float:
    return tokens + pair_cost * tokens**2 * (0.5 if is_chain else 1.0)


def common_prefix(one: Ints, other: Ints) -> int:
    """Length of the longest common prefix."""
    width = min(len(one), len(other))
    differing = np.flatnonzero(one[:width] != other[:width])
    return int(differing[0]) if len(differing) else width


def microbatches(trees: Sequence[TokenTree], budget: int) -> list[list[TokenTree]]:
    """Batches of rows of similar size, at most `budget` padded tokens each; branching rows apart from others.

    The masks of one batch have at most `MAX_BRANCHING_TOKENS` ** 2 entries.
    """
    batches: list[list[TokenTree]] = []
    real = 0
    for tree in sorted(trees, key=lambda t: (t.is_chain, t.size)):
        # Sorted by size, so the newest row is the widest of its batch.
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


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors of one microbatch, right-padded."""

    ids: Tensor
    """(B, N) int64"""

    depths: Tensor
    """(B, N) int64"""

    mask: Tensor | None
    """(B, 1, N, N) additive; None if no row has branches."""

    places: Tensor
    """(S,) int64: places of the sequences' tokens among the B * N tokens of the batch."""

    sequences: list[tuple[int, int]]
    """(index, length) of each sequence, in the order of `places`."""


def pack(trees: Sequence[TokenTree], device: torch.device, dtype: torch.dtype) -> Packed:
    """The tensors of `trees`, the mask in `dtype`."""
    width = max(tree.size for tree in trees)
    ids = np.zeros((len(trees), width), np.int64)
    depths = np.zeros((len(trees), width), np.int64)
    for row, tree in enumerate(trees):
        ids[row, : tree.size], depths[row, : tree.size] = tree.ids, tree.depths
    paths = [(index, path + row * width) for row, tree in enumerate(trees) for index, path in tree.paths]
    return Packed(
        ids=torch.from_numpy(ids).to(device),
        depths=torch.from_numpy(depths).to(device),
        # Right padding: causal attention keeps real tokens from seeing it.
        mask=None if all(tree.is_chain for tree in trees) else _mask(trees, width, device, dtype),
        places=torch.from_numpy(np.concatenate([path for _, path in paths])).to(device),
        sequences=[(index, len(path)) for index, path in paths],
    )


def _mask(trees: Sequence[TokenTree], width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """0 where a token attends, -inf elsewhere; padding attends to itself, so that no row is empty."""
    visible = np.zeros((len(trees), width, width), np.bool_)
    visible[:, np.arange(width), np.arange(width)] = True
    for row, tree in enumerate(trees):
        visible[row, : tree.size, : tree.size] = tree.visible()
    hidden = torch.from_numpy(~visible).to(device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]


def packed_logits(model: PreTrainedModel, packed: Packed) -> Tensor:
    """Logits (B, N, V) after every token."""
    if packed.mask is None:
        output: Any = model(input_ids=packed.ids, use_cache=False)
    else:
        output = model(
            input_ids=packed.ids, position_ids=packed.depths, attention_mask=packed.mask, use_cache=False
        )
    return output.logits


def target_logprobs(logits: Tensor, packed: Packed, targets: Tensor) -> Tensor:
    """Logits (B, N, V), targets (S,) -> log probabilities (S,) of the targets, float32 or wider.

    The normalizer is computed once per token, however many sequences share the token.
    """
    flat = logits.flatten(0, 1)
    flat = flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat
    return flat[packed.places, targets] - flat.logsumexp(-1)[packed.places]


def pair_cost(model: PreTrainedModel) -> float:
    """The cost of one token's attention to another, relative to one token's matrix products.

    A token takes two operations per parameter, a pair four per layer and channel, which run at about three
    quarters of the rate (measured on a CPU, docs/benchmarks.md).
    """
    config: Any = model.config
    pair = 4 * config.num_hidden_layers * config.hidden_size / 0.75
    return pair / (2 * sum(p.numel() for p in model.parameters()))


@torch.no_grad()
def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether `model` gives a packed row the log probabilities that it gives plain rows.

    Compares four sequences that branch at two depths. False for a model that ignores the mask or the
    positions it is given (ALiBi, positions counted by the model itself): that one trains on plain rows.
    """
    generator = np.random.default_rng(0)
    stem, left, right, *tails = (generator.integers(0, int(model.config.vocab_size), 4) for _ in range(7))
    sequences = [
        np.concatenate(parts)
        for parts in (
            (stem, left, tails[0]),
            (stem, left, tails[1]),
            (stem, right, tails[2]),
            (stem, tails[3]),
        )
    ]
    (tree,) = token_trees(sequences, pair_cost=0.0, budget=10**6)
    packed = pack([tree], model.device, model.dtype)
    try:
        together = packed_logits(model, packed).flatten(0, 1)[packed.places].float().log_softmax(-1)
    except FORWARD_ERRORS:
        return False  # It takes no such mask.
    alone = torch.cat([_plain(model, sequences[index]) for index, _ in packed.sequences])
    longer = torch.cat(
        [
            _plain(model, np.concatenate([sequences[index], stem]))[: len(sequences[index])]
            for index, _ in packed.sequences
        ]
    )
    allowed = PROOF_FLOOR + PROOF_FACTOR * float((longer - alone).abs().max())
    return float((together - alone).abs().max()) <= allowed


def _plain(model: PreTrainedModel, ids: np.ndarray) -> Tensor:
    """Log probabilities (T, V) of one sequence [T] in a row of its own."""
    output: Any = model(input_ids=torch.from_numpy(ids)[None].to(model.device), use_cache=False)
    return output.logits[0].float().log_softmax(-1)
