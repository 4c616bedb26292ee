"""In which way do log probabilities differ from the trainer's: shifted, cut short, of the likeliest token, or
of tokens that were not sampled?

Pure. Each answer is a pattern that noise does not make; where none fits the answer is `logprob_gap`. The
patterns are faults of servers and trainers that have been reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tinkerscript.rollouts.call import FloatArray, IntArray

MIN_TOKENS = 8
"""Tokens of misaligned calls below which no pattern is claimed."""

SHIFTS = (1, -1, 2, -2)
CLEAR = 0.2
"""A pattern must explain all but this share of the gap."""

MATCH = 0.01
"""Log probabilities this near to each other are one."""

NEARLY_ALL = 0.98

MOST_CALLS = 0.8
"""Share of the misaligned calls that must show a pattern of one call."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The n sampled tokens of one call."""

    ids: IntArray
    """int32 [n]"""

    sampler: FloatArray
    """float32 [n]"""

    trainer: FloatArray
    """float32 [n]"""

    @property
    def gap(self) -> float:
        return float(np.abs(self.sampler - self.trainer).mean())

    @property
    def matches(self) -> np.ndarray:
        """bool [n]"""
        return np.abs(self.sampler - self.trainer) <= MATCH


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong: a name of `ERRORS`, and the figures."""

    name: str
    detail: str


def diagnose(
    pairs: Sequence[Pair],
    *,
    threshold: float,
    retokenise: Callable[[IntArray], Sequence[int]] | None = None,
) -> Finding | None:
    """The finding about calls of which some differ by more than `threshold` on average; None if none does.

    `retokenise(ids)` encodes what ids decode to; without it ids made from text are not told from other gaps.
    """
    bad = [pair for pair in pairs if len(pair.ids) and pair.gap > threshold]
    if not bad:
        return None
    tokens = sum(len(pair.ids) for pair in bad)
    mean = sum(pair.gap * len(pair.ids) for pair in bad) / tokens
    figures = f"mean |dlogp| {mean:.3g} over {tokens} tokens of {len(bad)} calls"
    if tokens >= MIN_TOKENS:
        if finding := _shifted(bad, mean, figures) or _truncated(bad, figures):
            return finding
        if _retokenised(bad, retokenise):
            return Finding(
                "ids_retokenised",
                "the first tokens of a call fit and what follows does not, and every id is what encoding its "
                f"text gives: ids made from text stand in the place of the sampled ones ({figures})",
            )
        if _of_the_likeliest(bad):
            return Finding(
                "logprobs_of_the_likeliest",
                "they are never below the trainer's, and equal to it in places: they are of the likeliest "
                f"token instead of the sampled one ({figures})",
            )
    return Finding("logprob_gap", f"the sampler's log probabilities are not the trainer's ({figures})")


def _shifted(bad: Sequence[Pair], mean: float, figures: str) -> Finding | None:
    best = min(SHIFTS, key=lambda shift: _residual(bad, shift))
    residual = _residual(bad, best)
    if residual > CLEAR * mean:
        return None
    places, way = abs(best), "late" if best < 0 else "early"
    return Finding(
        "logprobs_shifted",
        f"they come {places} token{'s' if places > 1 else ''} too {way}: {figures}, {residual:.3g} after "
        "moving them back",
    )


def _residual(bad: Sequence[Pair], shift: int) -> float:
    """Mean |sampler[i] - trainer[i + shift]| within the calls; infinite where too little overlaps."""
    total, number = 0.0, 0
    for pair in bad:
        ours = pair.sampler[max(0, -shift) : len(pair.ids) - max(0, shift)]
        theirs = pair.trainer[max(0, shift) : len(pair.ids) - max(0, -shift)]
        if len(pair.ids) > abs(shift):
            total += float(np.abs(ours - theirs).sum())
            number += len(ours)
    return total / number if number >= MIN_TOKENS // 2 else float("inf")


def _truncated(bad: Sequence[Pair], figures: str) -> Finding | None:
    """The ends of calls have one filler, mostly 0, and what is before them fits."""
    fits, missing = 0, 0
    for pair in bad:
        kept = _before_filler(pair.sampler)
        cut = len(pair.ids) - kept
        if (cut > 1 or pair.sampler[-1] == 0) and (not kept or pair.matches[:kept].mean() >= MOST_CALLS):
            fits += 1
            missing += cut
    if fits < MOST_CALLS * len(bad):
        return None
    return Finding(
        "logprobs_truncated",
        f"the last {missing / fits:.1f} tokens of a call, on average, have a filler instead ({figures})",
    )


def _before_filler(logprobs: FloatArray) -> int:
    """How many come before the run of equal values at the end."""
    other = logprobs[::-1] != logprobs[-1]
    return len(logprobs) - int(np.argmax(other)) if other.any() else 0


def _retokenised(bad: Sequence[Pair], retokenise: Callable[[IntArray], Sequence[int]] | None) -> bool:
    """Calls begin with what fits, nothing fits after the first token that does not, and ids are canonical."""
    if retokenise is None:
        return False
    heads = [int(np.argmin(pair.matches)) for pair in bad]
    tails = np.concatenate([pair.matches[head:] for pair, head in zip(bad, heads, strict=True)])
    begins = np.mean([head > 0 for head in heads])
    if begins < CLEAR or tails.mean() > CLEAR:
        return False
    return all(list(retokenise(pair.ids)) == pair.ids.tolist() for pair in bad)


def _of_the_likeliest(bad: Sequence[Pair]) -> bool:
    """Never below the trainer's; where above, the two together are no more than 1."""
    sampler = np.concatenate([pair.sampler for pair in bad]).astype(np.float64)
    trainer = np.concatenate([pair.trainer for pair in bad]).astype(np.float64)
    above = sampler - trainer > MATCH
    if above.all() or not above.any() or (sampler - trainer >= -MATCH).mean() < NEARLY_ALL:
        return False
    room = np.exp(sampler[above]) + np.exp(trainer[above]) <= 1 + MATCH
    return bool(room.mean() >= NEARLY_ALL)
