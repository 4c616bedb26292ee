"""Choosing tokens: temperature, top-k, top-p and one uniform number a token.

Inverse-CDF sampling: a row's uniforms are drawn when the row is admitted, so a seeded request gives the
same tokens whatever else is in the batch (up to the rounding of its logits).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of the live rows, each a tensor (n,)."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    plain: bool
    """True when every row samples at temperature 1 without truncation."""

    truncated: bool
    """True when any row has top_p < 1 or top_k > 0."""

    top: int = 0
    """Most alternatives that a row wants to know."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One token for each row."""

    ids: Tensor
    """(n,)"""

    logprobs: Tensor
    """(n,)"""

    top_ids: Tensor | None = None
    """(n, settings.top) most probable ids, best first; None if nobody asked."""

    top_logprobs: Tensor | None = None
    """(n, settings.top)"""


def choose(logits: Tensor, uniforms: Tensor, settings: RowSettings, allowed: Tensor | None = None) -> Chosen:
    """logits (n, V), uniforms (n,) in [0, 1), allowed (n, V) bool -> one token for each row.

    Log probabilities are of the distribution after temperature, and before `allowed`, top-k and top-p; at
    temperature 0 (greedy) they are those of temperature 1.
    """
    logits = logits.float()
    if settings.plain and allowed is None:
        logprobs = torch.log_softmax(logits, dim=-1)
        return _chosen(_inverse_cdf(logprobs.exp(), uniforms), logprobs, settings.top)
    greedy = settings.temperature == 0
    scaled = logits / torch.where(greedy, 1.0, settings.temperature)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    if allowed is None:
        weights = logprobs.exp()
    else:
        # Anew, since what is allowed may be so improbable that its weights are all 0.
        weights = torch.softmax(scaled.masked_fill(~allowed, -torch.inf), dim=-1)
    best = weights.argmax(-1)
    if settings.truncated:
        weights = truncate(weights, settings.top_p, settings.top_k)
    return _chosen(torch.where(greedy, best, _inverse_cdf(weights, uniforms)), logprobs, settings.top)


def _chosen(ids: Tensor, logprobs: Tensor, top: int) -> Chosen:
    own = logprobs.gather(-1, ids[:, None])[:, 0]
    if not top:
        return Chosen(ids, own)
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return Chosen(ids, own, best.indices, best.values)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds uniform * total: (n, V), (n,) -> (n,)."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1].contiguous()
    ids = torch.searchsorted(cumulative, (uniforms * total).unsqueeze(-1), right=True).squeeze(-1)
    # Rounding may land on the total itself; the last id with weight is then the right one.
    last = torch.searchsorted(cumulative, total.unsqueeze(-1)).squeeze(-1)
    return torch.minimum(ids, last)


def truncate(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Set to 0 what top-k, then top-p, exclude: weights (n, V), top_p (n,), top_k (n,), <= 0 for no limit.

    Top-p keeps the smallest set of the most probable ids whose probability reaches top_p, at least one.
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    keep = (top_k[:, None] <= 0) | (rank < top_k[:, None])
    ordered = ordered * keep
    before = ordered.cumsum(-1) - ordered
    keep = keep & ((before < top_p[:, None] * ordered.sum(-1, keepdim=True)) | (top_p[:, None] >= 1))
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter(-1, order, ordered * keep)
