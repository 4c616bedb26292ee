"""Training rows: sequences with a common prefix share a row that computes every distinct prefix once.

A row is a token tree: each token attends to itself and its ancestors. Short rows attend through a mask, long
ones segment by segment.

Shapes: B rows of at most N tokens. S positions, one sequence after another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tinkerscript.engine.decoder import FORWARD_ERRORS, OwnLogits, distance, own_logits, text_config_of
from tinkerscript.engine.layer_kinds import LayerKinds, narrowed_windows
from tinkerscript.engine.routing import UNKNOWN

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

# Limit of rows with branches without segments: their mask takes 256 MiB in float32, and 1 GiB at 16,384.
MAX_BRANCHING_TOKENS = 8192

# Up to this size one large product is faster than many small ones, so rows use a mask.
MASKED_TOKENS = 1024

SEGMENT_COST = 1.5
"""Cost of a pair in a segment, relative to one in a plain row (measured on a CPU)."""

# A CPU's kernel needs a mask, so only this many tokens attend to a prefix at once.
QUERY_BLOCK = 512

SEGMENTS = "tinkerscript_segments"
"""Our attention in Hugging Face's registry, used where `Packed.mask` has segments."""

PADDING_TOKENS = 256
"""Padding that costs as much as a pass of a small model."""

PADDING_SHARE = 0.125


@dataclass(slots=True)
class TokenTree:
    ids: Ints
    """[N], parents before children"""

    depths: Ints
    """[N]: positions"""

    paths: list[tuple[int, Ints]] = field(default_factory=list[tuple[int, Ints]])
    """(sequence index, places [T] of its tokens)"""

    experts: Bytes | None = None
    """[N, bytes]: experts to choose."""

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        return bool(self.depths[-1] == self.size - 1)

    @property
    def pairs(self) -> int:
        return int(self.depths.sum()) + self.size

    def segments(self) -> Iterator[tuple[int, int, Ints]]:
        """Yield (begin, end, places of all earlier tokens) for what each sequence added."""
        filled = 0
        for _, path in self.paths:
            if len(path) and path[-1] >= filled:
                before = int(np.searchsorted(path, filled))
                yield filled, int(path[-1]) + 1, path[:before]
                filled = int(path[-1]) + 1

    def visible(self) -> NDArray[np.bool_]:
        """[N, N]: whether the row's token attends to the column's."""
        seen = np.zeros((self.size, self.size), np.bool_)
        for begin, end, before in self.segments():
            seen[begin:end, before] = True
            seen[begin:end, begin:end] = np.tri(end - begin, dtype=np.bool_)
        return seen

    def grow(self, index: int, ids: Ints, shared: int, experts: Bytes | None = None) -> None:
        begin, new = self.size, len(ids) - shared
        start = self.paths[-1][1][:shared] if self.paths else np.empty(0, np.int64)
        self.paths.append((index, np.concatenate([start, np.arange(begin, begin + new)])))
        self.ids = np.concatenate([self.ids, ids[shared:]])
        self.depths = np.concatenate([self.depths, np.arange(shared, len(ids))])
        if experts is not None:
            before = experts[:0] if self.experts is None else self.experts
            self.experts = np.concatenate([before, experts[shared:]])


def chain(index: int, ids: Ints, experts: Bytes | None = None) -> TokenTree:
    tree = TokenTree(np.empty(0, np.int64), np.empty(0, np.int64))
    tree.grow(index, ids, 0, experts)
    return tree


def token_trees(
    sequences: Sequence[Ints],
    *,
    pair_cost: float,
    budget: int,
    segments: bool = False,
    experts: Sequence[Bytes] | None = None,
) -> list[TokenTree]:
    """Arrange `sequences` [T_i] in rows of at most `budget` tokens, or their longest sequence.

    Rows with branches may take twice their longest sequence, but without `segments` at most
    `MAX_BRANCHING_TOKENS`. A sequence joins the tree before it, in the order of ids, if that is cheaper: a
    masked tree computes all pairs of tokens, at `pair_cost` relative to a token's other operations. Tokens
    with other `experts`, uint8 [T_i, bytes] each, are not shared.
    """
    trees: list[TokenTree] = []
    before: Bytes | None = None
    # Big-endian bytes sort like ids.
    keys = [ids.astype(">i8").view(np.uint8).reshape(-1, 8) for ids in sequences]
    if experts is not None:
        keys = [np.hstack(pair) for pair in zip(keys, experts, strict=True)]
    for index in sorted(range(len(sequences)), key=lambda i: keys[i].tobytes()):
        ids, chosen = sequences[index], None if experts is None else experts[index]
        shared = 0 if before is None else common_prefix(before, keys[index])
        if shared and _joins(trees[-1], len(ids), shared, pair_cost, budget, segments):
            trees[-1].grow(index, ids, shared, chosen)
        else:
            trees.append(chain(index, ids, chosen))
        before = keys[index]
    return trees


def _joins(tree: TokenTree, length: int, shared: int, pair_cost: float, budget: int, segments: bool) -> bool:
    joined = tree.size + length - shared
    if tree.is_chain and tree.size == shared:
        return True  # It equals or continues the only other one.
    longest = max(int(tree.depths.max()) + 1, length)
    limit = max(budget, 2 * longest)
    if joined > tree.size and joined > (limit if segments else min(limit, MAX_BRANCHING_TOKENS)):
        return False
    alone = _cost(tree.size, tree.pairs, pair_cost, tree.is_chain, segments)
    alone += _cost(length, _pairs(length), pair_cost, True, segments)
    pairs = tree.pairs + _pairs(length) - _pairs(shared)
    return _cost(joined, pairs, pair_cost, False, segments) <= alone


def _cost(tokens: int, visible: int, pair_cost: float, is_chain: bool, segments: bool) -> float:
    if is_chain:
        pairs = float(visible)
    else:
        pairs = SEGMENT_COST * visible if segments and tokens > MASKED_TOKENS else tokens**2
    return tokens + pair_cost * pairs


def _pairs(length: int) -> int:
    return length * (length + 1) // 2


def common_prefix(one: Bytes, other: Bytes) -> int:
    width = min(len(one), len(other))
    differing = np.flatnonzero((one[:width] != other[:width]).any(axis=1))
    return int(differing[0]) if len(differing) else width


def microbatches(trees: Sequence[TokenTree], budget: int, *, segments: bool = False) -> list[list[TokenTree]]:
    """Batch rows of similar size, at most `budget` padded tokens each, with branches apart from without."""
    batches: list[list[TokenTree]] = []
    real = 0
    for tree in sorted(trees, key=lambda t: (t.is_chain, t.size)):
        # The newest row is the widest.
        padded = (len(batches[-1]) + 1) * tree.size if batches else 0
        padding = padded - real - tree.size
        fits = batches and batches[-1][0].is_chain == tree.is_chain and padded <= budget
        masked = not tree.is_chain and not (segments and tree.size > MASKED_TOKENS)
        fits = fits and (not masked or padded * tree.size <= MAX_BRANCHING_TOKENS**2)
        if fits and padding <= PADDING_TOKENS + PADDING_SHARE * real:
            batches[-1].append(tree)
            real += tree.size
        else:
            batches.append([tree])
            real = tree.size
    return batches


@dataclass(frozen=True, slots=True)
class Packed:
    ids: Tensor
    """(B, N) int64"""

    depths: Tensor
    """(B, N) int64"""

    mask: Tensor | dict[str, Tensor] | None
    """(B, 1, N, N) additive, or one per kind of layer; None without branches.

    Long rows have segments: (1, 1, K, 5) int64 on the CPU: row, range of tokens, range attended to (causally
    if the same).
    """

    places: Ints
    """[S] among the batch's B * N tokens"""

    sequences: list[tuple[int, int]]
    """(index, length) in the order of `places`"""

    experts: Bytes | None = None
    """[B * N, bytes]: experts to choose, unknown in padding."""

    @property
    def inputs(self) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": self.ids, "use_cache": False}
        if self.mask is None:
            return inputs
        return {**inputs, "position_ids": self.depths, "attention_mask": self.mask}


def pack(trees: Sequence[TokenTree], model: PreTrainedModel, *, segments: bool = False) -> Packed:
    """`segments`: no mask for rows over `MASKED_TOKENS`."""
    device = model.device
    width = max(tree.size for tree in trees)
    ids = np.zeros((len(trees), width), np.int64)
    depths = np.zeros((len(trees), width), np.int64)
    for row, tree in enumerate(trees):
        ids[row, : tree.size], depths[row, : tree.size] = tree.ids, tree.depths
    experts = None
    if known := [tree.experts for tree in trees if tree.experts is not None]:
        experts = np.full((len(trees), width, known[0].shape[1]), UNKNOWN, np.uint8)
        for row, of_tree in enumerate(known):
            experts[row, : len(of_tree)] = of_tree
        experts = experts.reshape(len(trees) * width, -1)
    paths = [(index, path + row * width) for row, tree in enumerate(trees) for index, path in tree.paths]
    mask = None
    # Causal attention never sees right padding.
    if not all(tree.is_chain for tree in trees):
        in_segments = segments and width > MASKED_TOKENS
        mask = _segments(trees) if in_segments else _masks(trees, width, model)
    return Packed(
        ids=torch.from_numpy(ids).to(device),
        depths=torch.from_numpy(depths).to(device),
        mask=mask,
        places=np.concatenate([path for _, path in paths]),
        sequences=[(index, len(path)) for index, path in paths],
        experts=experts,
    )


def _masks(trees: Sequence[TokenTree], width: int, model: PreTrainedModel) -> Tensor | dict[str, Tensor]:
    """Padding attends to itself, to avoid NaN."""
    visible = np.zeros((len(trees), width, width), np.bool_)
    visible[:, np.arange(width), np.arange(width)] = True
    depths = np.zeros((len(trees), width), np.int64)
    for row, tree in enumerate(trees):
        visible[row, : tree.size, : tree.size] = tree.visible()
        depths[row, : tree.size] = tree.depths
    hidden, positions = (torch.from_numpy(each).to(model.device) for each in (~visible, depths))
    kinds = LayerKinds.of(model.config)

    def of_kind(kind: str) -> Tensor:
        queries = positions[:, :, None]
        beyond = kinds.hides(kind, queries - positions[:, None], queries)
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=model.device)
        return mask.masked_fill_(hidden if beyond is None else hidden | beyond, -torch.inf)[:, None]

    return kinds.masks(of_kind)


def _segments(trees: Sequence[TokenTree]) -> Tensor:
    rows: list[tuple[int, int, int, int, int]] = []
    for row, tree in enumerate(trees):
        for begin, end, before in tree.segments():
            runs = np.split(before, np.flatnonzero(np.diff(before) != 1) + 1)
            rows += [(row, begin, end, int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
            rows.append((row, begin, end, begin, end))
    return torch.tensor(rows)[None, None]


_Segments = list[tuple[int, slice, list[slice]]]
"""(row, its tokens, ranges attended to, ending with its own)"""


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """An attention function for Hugging Face: (B, heads, N, D), (B, kv_heads, N, D) -> (B, N, heads, D)."""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        query, key, value = (each.to(half) for each in (query, key, value))
    segments: _Segments = []
    for row, begin, end, first, last in attention_mask.flatten(0, 2).tolist():
        if not segments or segments[-1][:2] != (row, slice(begin, end)):
            segments.append((row, slice(begin, end), []))
        segments[-1][2].append(slice(first, last))
    return _SegmentAttention.apply(query, key, value, segments, given.get("scaling")).transpose(1, 2), None


AttentionInterface.register(SEGMENTS, _attention)
AttentionMaskInterface.register(SEGMENTS, sdpa_mask)


class _SegmentAttention(torch.autograd.Function):
    """Attention of each segment to its prefix and itself, recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: _Segments, scale: float | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.segments, ctx.scale = segments, scale
        output = torch.zeros_like(query)
        for row, own, ranges in segments:
            keys, values = (_gather(each[row], ranges) for each in (key, value))
            for block, end in _blocks(own, keys):
                output[row, :, block] = _attend(query[row, :, block], keys[:, :end], values[:, :end], scale)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value = ctx.saved_tensors
        sums = [torch.zeros_like(each) for each in (query, key, value)]
        for row, own, ranges in ctx.segments:
            keys, values = (_gather(each[row], ranges) for each in (key, value))
            gathered = [torch.zeros_like(keys), torch.zeros_like(values)]
            for block, end in _blocks(own, keys):
                parts = (query[row, :, block], keys[:, :end], values[:, :end])
                parts = [part.detach().requires_grad_() for part in parts]
                with torch.enable_grad():
                    output = _attend(*parts, ctx.scale)
                found = torch.autograd.grad(output, parts, gradient[row, :, block])
                sums[0][row, :, block] = found[0]
                for total, part in zip(gathered, found[1:], strict=True):
                    total[:, :end] += part
            for total, parts in zip(sums[1:], gathered, strict=True):
                for place, part in zip(
                    ranges, parts.split([r.stop - r.start for r in ranges], 1), strict=True
                ):
                    total[row, :, place] += part
        return sums[0], sums[1], sums[2], None, None


def _gather(tensor: Tensor, ranges: list[slice]) -> Tensor:
    """(kv_heads, N, D) -> (kv_heads, n, D)"""
    return torch.cat([tensor[:, each] for each in ranges], dim=1)


def _blocks(own: slice, keys: Tensor) -> Iterator[tuple[slice, int]]:
    prefix = keys.shape[1] - (own.stop - own.start)
    width = QUERY_BLOCK if prefix and keys.device.type == "cpu" else own.stop - own.start
    for begin in range(own.start, own.stop, width):
        end = min(begin + width, own.stop)
        yield slice(begin, end), prefix + end - own.start


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """query (heads, L, D), keys and values (kv_heads, n, D) that end with the query's L -> (heads, L, D)."""
    (heads, length, _), (kv_heads, places, _) = query.shape, keys.shape
    groups = heads // kv_heads
    keys, values = (each[:, None].expand(-1, groups, -1, -1) for each in (keys, values))
    mask: Any = None
    if length < places and query.device.type == "cpu":
        mask = torch.ones(length, places, dtype=torch.bool).tril(places - length)
    elif length < places:
        mask = causal_lower_right(length, places)  # GPU kernels materialize no mask.
    output = F.scaled_dot_product_attention(
        query.unflatten(0, (kv_heads, groups)),
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return output.flatten(0, 1)


def pair_cost(model: PreTrainedModel) -> float:
    """Cost of one token's attention to another, relative to one token's matrix products.

    A parameter takes two operations, a layer's channel four, at three quarters of the rate
    (docs/benchmarks.md).
    """
    config = text_config_of(model)
    pair = 4 * config.num_hidden_layers * config.hidden_size / 0.75
    return pair / (2 * sum(p.numel() for p in model.parameters()))


def shares_prefixes(model: PreTrainedModel, own: OwnLogits | None = None) -> bool:
    """Whether rows with branches and a mask give the same logprobs as plain rows.

    False for models that ignore mask or positions (such as ALiBi).
    """
    return _row_equals_plain_rows(model, own, segments=False)


def attend_in_segments(model: PreTrainedModel, own: OwnLogits | None = None) -> bool:
    """Make `model` attend by segments in long rows, if that equals plain rows.

    False for a custom attention (sinks, soft caps).
    """
    config: Any = model.config
    if config._attn_implementation != "sdpa":
        return False
    own = own or own_logits(model)
    config._attn_implementation = SEGMENTS
    if _row_equals_plain_rows(model, own, segments=True):
        return True
    config._attn_implementation = "sdpa"
    return False


def takes_segments(model: PreTrainedModel) -> bool:
    config: Any = model.config
    return config._attn_implementation == SEGMENTS


@torch.no_grad()
def _row_equals_plain_rows(model: PreTrainedModel, own: OwnLogits | None, *, segments: bool) -> bool:
    own = own or own_logits(model)
    if not own.windows:
        return False
    (tree,) = token_trees(list(own.ids.cpu().numpy()), pair_cost=0.0, budget=10**6)
    try:
        with narrowed_windows(model):
            packed = pack([tree], model)
            if segments:
                packed = replace(packed, mask=_segments([tree]))
            output: Any = model(**packed.inputs)
    except FORWARD_ERRORS:
        return False  # The model does not accept such a mask.
    together = output.logits.flatten(0, 1)[packed.places].unflatten(0, own.ids.shape)
    return distance(own.logits[[index for index, _ in packed.sequences]], together) <= own.limit
