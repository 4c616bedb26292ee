"""What a model says of a prompt: log probabilities of its tokens, of the likeliest ones, and of chosen ones.

P prompt tokens, K tokens a position. Position 0 has nothing before it, so row i of anything with P - 1 rows
is of position i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tinkerscript.engine.decoder import Decoder

NO_LOGPROB = -99999.0
"""Tinker's mark of an empty cell in a table of the likeliest tokens; its token id is 0."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    logprobs: NDArray[np.float32]
    """[P], NaN where nothing was asked."""

    top_ids: NDArray[np.int32] | None
    """[P, K]"""

    top_logprobs: NDArray[np.float32] | None
    """[P, K], `NO_LOGPROB` where nothing was asked."""

    chosen: NDArray[np.float32] | None
    """One for each of the asked (row, id) pairs."""


@torch.inference_mode()
def score_prompt(
    decoder: Decoder,
    ids: list[int],
    *,
    last: int | None = None,
    top: int = 0,
    chosen: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
) -> PromptScores:
    """Score positions 1 to P - 1, or the `last` ones of them.

    `chosen`: rows (0 to P - 2) and ids, of equal length.
    """
    tokens = torch.tensor([ids], device=decoder.device)
    every = torch.log_softmax(decoder.score(tokens)[0, :-1].float(), -1)  # (P - 1, V)
    first = 0 if last is None else max(0, len(ids) - 1 - last)
    logprobs = np.full(len(ids), np.nan, np.float32)
    logprobs[first + 1 :] = every.gather(-1, tokens[0, 1:, None])[first:, 0].cpu().numpy()
    top_ids = top_logprobs = None
    if top:
        best = every[first:].topk(min(top, every.shape[-1]), dim=-1)
        top_ids = np.zeros((len(ids), top), np.int32)
        top_logprobs = np.full((len(ids), top), NO_LOGPROB, np.float32)
        top_ids[first + 1 :, : best.indices.shape[1]] = best.indices.cpu().numpy()
        top_logprobs[first + 1 :, : best.indices.shape[1]] = best.values.cpu().numpy()
    picked = None
    if chosen is not None:
        rows, columns = (torch.from_numpy(part).to(decoder.device) for part in chosen)
        picked = every[rows, columns].cpu().numpy()
    return PromptScores(logprobs, top_ids, top_logprobs, picked)
