"""`choose` samples one token per row from logits; `score_prompt` scores given tokens.

Each token takes one uniform number from its row's generator, so the rest of the batch changes a seeded
request only by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinkerscript.engine.decoder import Decoder

# A grammar allowed all possible tokens, several, or one, as in `rollouts.TokenConstraint`.
FREE, CUT, FORCED = range(3)

# Tinker fills tables of top tokens with this.
NO_LOGPROB = -99999.0


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of n rows; tensors are (n,)."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    plain: bool
    """All rows sample at temperature 1 without truncation."""

    truncated: bool
    """Some row has top_p < 1, top_k > 0 or min_p > 0."""

    top: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    ids: Tensor
    """(n,)"""

    logprobs: Tensor
    """(n,)"""

    top_ids: Tensor | None = None
    """(n, settings.top), best first."""

    top_logprobs: Tensor | None = None
    """(n, settings.top)"""

    constraints: Tensor | None = None
    """(n,): `FREE`, `CUT` or `FORCED`; None without grammars."""


def choose(logits: Tensor, uniforms: Tensor, settings: RowSettings, allowed: Tensor | None = None) -> Chosen:
    """logits (n, V), uniforms (n,) in [0, 1), allowed (n, V) bool -> one token per row.

    Logprobs and `constraints` are from after temperature (1 if greedy), before `allowed`, min-p, top-k and
    top-p.
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
        # Masking the probabilities instead would fail if all allowed ones underflowed in float32.
        weights = torch.softmax(scaled.masked_fill(~allowed, -torch.inf), dim=-1)
    best = weights.argmax(-1)
    if settings.truncated:
        weights = truncate(weights, settings.top_p, settings.top_k, settings.min_p)
    constraints = None if allowed is None else _constraints(allowed, logprobs)
    chosen = torch.where(greedy, best, _inverse_cdf(weights, uniforms))
    return _chosen(chosen, logprobs, settings.top, constraints)


def _constraints(allowed: Tensor, logprobs: Tensor) -> Tensor:
    cut = (logprobs.exp() * ~allowed).sum(-1) > 0
    return torch.where(allowed.sum(-1) == 1, FORCED, torch.where(cut, CUT, FREE))


def _chosen(ids: Tensor, logprobs: Tensor, top: int, constraints: Tensor | None = None) -> Chosen:
    own = logprobs.gather(-1, ids[:, None])[:, 0]
    if not top:
        return Chosen(ids, own, constraints=constraints)
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    return Chosen(ids, own, best.indices, best.values, constraints)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first id with a cumulative weight above uniform * total: (n, V), (n,) -> (n,)."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1].contiguous()
    ids = torch.searchsorted(cumulative, (uniforms * total).unsqueeze(-1), right=True).squeeze(-1)
    # Rounding may reach the total: then take the last id with any weight.
    last = torch.searchsorted(cumulative, total.unsqueeze(-1)).squeeze(-1)
    return torch.minimum(ids, last).clamp(max=weights.shape[-1] - 1)  # With NaN, both exceed the end.


def truncate(weights: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Zero the weights (n, V) that min-p (n,), then top-k (n,), then top-p (n,) exclude.

    Min-p: below that share of the largest weight (Nguyen et al. 2024, arXiv:2407.01082). top_k <= 0: no
    limit.
    """
    weights = weights * (weights >= min_p[:, None] * weights.amax(-1, keepdim=True))
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    keep = (top_k[:, None] <= 0) | (rank < top_k[:, None])
    ordered = ordered * keep
    before = ordered.cumsum(-1) - ordered
    keep = keep & ((before < top_p[:, None] * ordered.sum(-1, keepdim=True)) | (top_p[:, None] >= 1))
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter(-1, order, ordered * keep)


@dataclass(frozen=True, slots=True)
class PromptScores:
    logprobs: NDArray[np.float32]
    """[P], NaN where not scored, as at position 0"""

    top_ids: NDArray[np.int32] | None
    """[P, K]"""

    top_logprobs: NDArray[np.float32] | None
    """[P, K], `NO_LOGPROB` where not scored"""

    chosen: NDArray[np.float32] | None


@torch.inference_mode()
def score_prompt(
    decoder: Decoder,
    ids: list[int],
    *,
    last: int | None = None,
    top: int = 0,
    chosen: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> PromptScores:
    """Score positions 1 to P - 1, or the `last` ones.

    `top`: how many of the most probable ids to return. `chosen`: rows [N] and ids [N] to score; row i (0 to P
    - 2) means position i + 1.
    """
    tokens = torch.tensor(ids, device=decoder.device)
    first = 0 if last is None else max(0, len(ids) - 1 - last)
    logprobs = np.full(len(ids), np.nan, np.float32)
    top_ids = np.zeros((len(ids), top), np.int32) if top else None
    top_logprobs = np.full((len(ids), top), NO_LOGPROB, np.float32) if top else None
    picked = None if chosen is None else np.empty(len(chosen[0]), np.float32)
    begin = 0
    for logits in decoder.score(tokens):
        end = min(begin + len(logits), len(ids) - 1)  # Nothing follows the last token.
        every = torch.log_softmax(
            logits[: end - begin].float(), -1
        )  # (end - begin, V), from position begin + 1
        if chosen is not None and picked is not None:
            inside = (begin <= chosen[0]) & (chosen[0] < end)
            rows, columns = (torch.from_numpy(part[inside]).to(decoder.device) for part in chosen)
            picked[inside] = every[rows - begin, columns].cpu().numpy()
        start = max(begin, first)
        every = every[max(start - begin, 0) :]
        own = every.gather(-1, tokens[start + 1 : end + 1, None])[:, 0]
        logprobs[start + 1 : end + 1] = own.cpu().numpy()
        if top_ids is not None and top_logprobs is not None:
            best = every.topk(min(top, every.shape[-1]), dim=-1)
            width = best.indices.shape[1]
            top_ids[start + 1 : end + 1, :width] = best.indices.cpu().numpy()
            top_logprobs[start + 1 : end + 1, :width] = best.values.cpu().numpy()
        begin = end
    return PromptScores(logprobs, top_ids, top_logprobs, picked)
