"""One microbatch of token trees as tensors, through any Hugging Face causal model.

B rows of at most N tokens; S sequence positions in all, those of one sequence after those of another. A token
that several sequences share is in several of the S positions and computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkerscript.engine.decoder import FORWARD_ERRORS
from tinkerscript.engine.prefix_tree import TokenTree, token_trees

PROOF_FACTOR = 20.0
PROOF_FLOOR = 1e-5
"""A packed row may differ from plain ones by the floor and so many times what the shape of a batch alone
changes; log probabilities."""


@dataclass(frozen=True, slots=True)
class Packed:
    """The tensors of one microbatch, right-padded."""

    ids: Tensor
    """(B, N) int64"""

    depths: Tensor
    """(B, N) int64"""

    mask: Tensor | None
    """(B, 1, N, N) additive; None where causal attention is all that is needed."""

    places: Tensor
    """(S,) int64: places of the sequences' tokens among the B * N of the batch."""

    sequences: list[tuple[int, int]]
    """(index, length) of each sequence, in the order of `places`."""


def pack(trees: Sequence[TokenTree], device: torch.device, dtype: torch.dtype) -> Packed:
    """`dtype` is the mask's."""
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
    """0 where a token may look, -inf elsewhere; padding looks at itself, so that no row is empty."""
    visible = np.zeros((len(trees), width, width), np.bool_)
    visible[:, np.arange(width), np.arange(width)] = True
    for row, tree in enumerate(trees):
        visible[row, : tree.size, : tree.size] = tree.visible()
    hidden = torch.from_numpy(~visible).to(device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]


def packed_logits(model: PreTrainedModel, packed: Packed) -> Tensor:
    """Logits after every token (B, N, V)."""
    if packed.mask is None:
        output: Any = model(input_ids=packed.ids, use_cache=False)
    else:
        output = model(
            input_ids=packed.ids, position_ids=packed.depths, attention_mask=packed.mask, use_cache=False
        )
    return output.logits


def target_logprobs(logits: Tensor, packed: Packed, targets: Tensor) -> Tensor:
    """Logits (B, N, V), targets (S,) -> log probability of each target after its token (S,), float32 or more.

    The normaliser is computed once a token, whatever the number of sequences it is shared by.
    """
    flat = logits.flatten(0, 1)
    flat = flat.float() if flat.dtype in (torch.bfloat16, torch.float16) else flat
    return flat[packed.places, targets] - flat.logsumexp(-1)[packed.places]


def pair_cost(model: PreTrainedModel) -> float:
    """Attention of one token to one other, in the cost of one token's matrix products.

    A token costs two operations a parameter, a pair four a layer and channel, which run at about three
    quarters of the rate (measured on a CPU, docs/benchmarks.md).
    """
    config: Any = model.config
    pair = 4 * config.num_hidden_layers * config.hidden_size / 0.75
    return pair / (2 * sum(p.numel() for p in model.parameters()))


@torch.no_grad()
def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether `model` gives a packed row the log probabilities that it gives plain sequences.

    Four sequences that part at two depths are compared. False for a model that does not take a mask or
    positions as they are given (ALiBi, positions counted by the model itself); it trains on plain rows.
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
        return False  # It does not take such a mask at all.
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
