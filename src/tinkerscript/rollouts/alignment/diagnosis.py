"""Compares logprobs: the sampler's with the trainer's, and sibling sequences with each other.

While the sampled tokens of a group's sequences agree, the same weights must give the next token one logprob,
and different next tokens probabilities that sum to at most 1 (`Contradictions`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.call import Call, FloatArray, IntArray, TokenConstraint
from tinkerscript.rollouts.rollout import Rollout, Segment

MAX_D = 50.0  # One impossible token leaves the sums finite.
MIN_TOKENS = 8  # Fewer tokens show no pattern.
SHIFTS = (1, -1, 2, -2)
UNEXPLAINED = 0.2  # Share of the gap that a pattern may leave.
EQUAL_WITHIN = 0.01
NEARLY_ALL = 0.98
MOST_CALLS = 0.8  # Share of the misaligned calls that must show the pattern.
MAX_TOTAL = 1.05  # Allows for rounding.
OVERFULL_SHARE = 0.05  # Share of prefixes above `MAX_TOTAL` on a noisy server.


def is_comparable(call: Call) -> bool:
    """Whether the logprobs are of the whole distribution."""
    return TokenConstraint.UNKNOWN not in call.constrained


@dataclass
class Gap:
    """The sampler's logprobs against the trainer's, as sums over n tokens.

    docs/rollouts.md#metrics-of-a-step has the formulas. k1 and k3 estimate KL(sampler || trainer) (Schulman
    2020, "Approximating KL divergence").
    """

    tokens: int = 0
    sum_d: float = 0.0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    sum_k3: float = 0.0
    sum_w: float = 0.0
    sum_w2: float = 0.0

    @classmethod
    def between(cls, sampler: FloatArray, trainer: FloatArray) -> Gap:
        """Compare float32 [n] each. Raises AlignmentError for NaN."""
        d = trainer.astype(np.float64) - sampler
        if np.isnan(d).any():
            raise AlignmentError("the trainer's or the sampler's logprobs are not numbers")
        d = d.clip(-MAX_D, MAX_D)
        w = np.exp(d)
        magnitude = np.abs(d)
        return cls(
            tokens=len(d),
            sum_d=float(d.sum()),
            sum_abs=float(magnitude.sum()),
            max_abs=float(magnitude.max(initial=0.0)),
            sum_k3=float((w - 1 - d).sum()),
            sum_w=float(w.sum()),
            sum_w2=float((w * w).sum()),
        )

    def add(self, other: Gap) -> None:
        self.tokens += other.tokens
        self.sum_d += other.sum_d
        self.sum_abs += other.sum_abs
        self.max_abs = max(self.max_abs, other.max_abs)
        self.sum_k3 += other.sum_k3
        self.sum_w += other.sum_w
        self.sum_w2 += other.sum_w2

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / self.tokens if self.tokens else 0.0

    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {}
        return {
            "mean_abs_dlogp": self.mean_abs,
            "max_abs_dlogp": self.max_abs,
            "k1": -self.sum_d / self.tokens,
            "k3": self.sum_k3 / self.tokens,
            "effective_sample_size": self.sum_w**2 / (self.tokens * self.sum_w2),
            "tokens_compared": float(self.tokens),
        }

    def as_json(self) -> dict[str, float]:
        return {key: value for key, value in asdict(self).items() if math.isfinite(value)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Gap:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


@dataclass(frozen=True, slots=True)
class Pair:
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
        return np.abs(self.sampler - self.trainer) <= EQUAL_WITHIN


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    detail: str


def diagnose(
    pairs: Sequence[Pair],
    *,
    threshold: float,
    retokenise: Callable[[IntArray], Sequence[int]] | None = None,
) -> Finding | None:
    """Name the pattern of the calls with a mean |dlogp| above `threshold`; None without such calls.

    Real servers return logprobs that are shifted, truncated, of the most likely token, or of tokens not
    sampled. Other findings are `logprob_gap`. `retokenise(ids)` encodes the ids' text again.
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
                "a call's first tokens match, the rest do not, and encoding its text gives its ids: "
                f"ids were encoded from text in place of the sampled ones ({figures})",
            )
        if _of_the_likeliest(bad):
            return Finding(
                "logprobs_of_the_likeliest",
                "they are never below the trainer's and equal them in places: they are of the most likely "
                f"token instead of the sampled one ({figures})",
            )
    return Finding("logprob_gap", f"the sampler's logprobs differ from the trainer's ({figures})")


def _shifted(bad: Sequence[Pair], mean: float, figures: str) -> Finding | None:
    found = {shift: _residuals(bad, shift) for shift in SHIFTS}
    best = min(found, key=lambda shift: found[shift][0])
    residual, otherwise = found[best]
    if residual >= UNEXPLAINED * min(mean, otherwise):
        return None
    places, way = abs(best), "late" if best < 0 else "early"
    return Finding(
        "logprobs_shifted",
        f"the logprobs are {places} token{'s' if places > 1 else ''} too {way}: {figures}, {residual:.3g} "
        "after shifting them back",
    )


def _residuals(bad: Sequence[Pair], shift: int) -> tuple[float, float]:
    """Return the mean |sampler[i] - trainer[i + shift]| within the calls, infinite for too little overlap,
    and the least that the same logprobs leave unshifted or shuffled.

    The second is also small for nearly equal logprobs (a collapsed policy), and where only the first or last
    tokens differ.
    """
    first, last = slice(abs(shift), None), slice(-abs(shift))
    of_sampler, of_trainer = (last, first) if shift > 0 else (first, last)
    ours = np.concatenate([pair.sampler[of_sampler] for pair in bad])
    theirs = np.concatenate([pair.trainer[of_trainer] for pair in bad])
    if len(ours) < MIN_TOKENS // 2:
        return float("inf"), 0.0
    others = (
        ours - np.concatenate([pair.trainer[of_sampler] for pair in bad]),
        theirs - np.concatenate([pair.sampler[of_trainer] for pair in bad]),
        ours - np.random.default_rng(0).permutation(theirs),
    )
    return float(np.abs(ours - theirs).mean()), min(float(np.abs(each).mean()) for each in others)


def _truncated(bad: Sequence[Pair], figures: str) -> Finding | None:
    """Whether calls end with a filler value, mostly 0."""
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
        f"the last {missing / fits:.1f} tokens of a call, on average, have a filler value ({figures})",
    )


def _before_filler(logprobs: FloatArray) -> int:
    other = logprobs[::-1] != logprobs[-1]
    return len(logprobs) - int(np.argmax(other)) if other.any() else 0


def _retokenised(bad: Sequence[Pair], retokenise: Callable[[IntArray], Sequence[int]] | None) -> bool:
    """Whether calls match only before a first mismatch, and have canonical ids."""
    if retokenise is None:
        return False
    heads = [int(np.argmin(pair.matches)) for pair in bad]
    tails = np.concatenate([pair.matches[head:] for pair, head in zip(bad, heads, strict=True)])
    begins = np.mean([head > 0 for head in heads])
    if begins < UNEXPLAINED or tails.mean() > UNEXPLAINED:
        return False
    return all(list(retokenise(pair.ids)) == pair.ids.tolist() for pair in bad)


def _of_the_likeliest(bad: Sequence[Pair]) -> bool:
    """Whether none is below the trainer's, and where one is above, both probabilities sum to at most 1."""
    sampler = np.concatenate([pair.sampler for pair in bad]).astype(np.float64)
    trainer = np.concatenate([pair.trainer for pair in bad]).astype(np.float64)
    above = sampler - trainer > EQUAL_WITHIN
    if above.all() or not above.any() or (sampler - trainer >= -EQUAL_WITHIN).mean() < NEARLY_ALL:
        return False
    room = np.exp(sampler[above]) + np.exp(trainer[above]) <= 1 + EQUAL_WITHIN
    return bool(room.mean() >= NEARLY_ALL)


@dataclass
class Contradictions:
    repeats: int = 0
    gap: float = 0.0
    """Summed |difference| of logprobs."""

    prefixes: int = 0

    overfull: int = 0

    def add(self, rollouts: Iterable[Rollout]) -> None:
        alike: defaultdict[tuple[object, ...], list[Segment]] = defaultdict(list)
        for rollout in rollouts:
            first = rollout.segments[0]
            call = first.call
            if not is_comparable(call):
                continue
            weights = (call.policy_versions, tuple(call.spans))
            settings = (call.temperature, call.top_p, call.top_k, call.logprob_kind)
            images = tuple(image for image in rollout.images if image.start < first.start)
            prompt = (rollout.tokens[: first.start].tobytes(), images)
            alike[(*prompt, *weights, *settings)].append(first)
        for segments in alike.values():
            if len(segments) > 1:
                ids = [segment.call.sampled_ids for segment in segments]
                self._descend(ids, [segment.call.sampled_logprobs for segment in segments])

    def _descend(self, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]) -> None:
        level = [list(range(len(ids)))]
        for depth in range(max(len(each) for each in ids)):
            level = [branch for members in level for branch in self._branches(members, depth, ids, logprobs)]
            if not level:
                return

    def _branches(
        self, members: list[int], depth: int, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]
    ) -> Iterator[list[int]]:
        by_token: defaultdict[int, list[int]] = defaultdict(list)
        for member in members:
            if depth < len(ids[member]):
                by_token[int(ids[member][depth])].append(member)
        total = 0.0
        for branch in by_token.values():
            values = [float(logprobs[member][depth]) for member in branch]
            total += float(np.exp(values[0]))
            self.repeats += len(values) - 1
            self.gap += sum(abs(value - values[0]) for value in values[1:])
            if len(branch) > 1:
                yield branch
        if len(by_token) > 1:
            self.prefixes += 1
            self.overfull += total > MAX_TOTAL

    def finding(self, *, threshold: float) -> Finding | None:
        """Return None with too little to compare, or only noise."""
        mean = self.gap / self.repeats if self.repeats else 0.0
        if self.repeats >= MIN_TOKENS and mean > threshold:
            return Finding(
                "logprobs_contradict",
                f"a token sampled again after the same prefix has a different logprob: mean difference "
                f"{mean:.3g} over {self.repeats} repeats",
            )
        if self.prefixes >= MIN_TOKENS and self.overfull > max(1, OVERFULL_SHARE * self.prefixes):
            return Finding(
                "logprobs_contradict",
                f"different tokens after the same prefix have probabilities that sum to more than 1, after "
                f"{self.overfull} of {self.prefixes} prefixes",
            )
        return None
