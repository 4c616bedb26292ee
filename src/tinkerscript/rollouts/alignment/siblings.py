"""Log probabilities that contradict each other, found without the trainer.

Sequences of a group begin with the same prompt. As long as their sampled tokens agree, the same weights must
have given the next token one log probability, and different next tokens no more than 1 in all. A stream that
is shifted, or that holds the likeliest token's, breaks this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tinkerscript.rollouts.alignment.diagnosis import MIN_TOKENS, Finding
from tinkerscript.rollouts.types import Rollout, Segment

FULL = 1.05
"""Probability that different tokens after one prefix may have in all, rounding included."""

OVERFULL_SHARE = 0.05
"""Share of prefixes that may be over `FULL` in a noisy server."""


@dataclass
class Contradictions:
    """What a comparison of siblings found."""

    repeats: int = 0
    """Times that a token was sampled again after the same prefix."""

    gap: float = 0.0
    """Summed |difference| of their log probabilities."""

    prefixes: int = 0
    """Prefixes after which different tokens were sampled."""

    overfull: int = 0
    """Those after which they have more than `FULL` in all."""

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Compare the first calls of the sequences of one group."""
        alike: defaultdict[tuple[object, ...], list[Segment]] = defaultdict(list)
        for rollout in rollouts:
            first = rollout.segments[0]
            call = first.call
            settings = (call.policy_versions, call.temperature, call.top_p, call.top_k, call.logprob_kind)
            alike[(rollout.tokens[: first.start].tobytes(), *settings)].append(first)
        for segments in alike.values():
            if len(segments) > 1:
                ids = [segment.call.sampled_ids for segment in segments]
                self._descend(ids, [segment.call.sampled_logprobs for segment in segments])

    def _descend(self, ids: Sequence[np.ndarray], logprobs: Sequence[np.ndarray]) -> None:
        """Walk down the tree of sampled tokens as far as it is shared."""
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
            self.overfull += total > FULL

    def finding(self, *, threshold: float) -> Finding | None:
        """None unless there is enough to compare and it contradicts itself beyond noise."""
        mean = self.gap / self.repeats if self.repeats else 0.0
        if self.repeats >= MIN_TOKENS and mean > threshold:
            return Finding(
                "logprobs_contradict",
                f"a token sampled again after the same prefix has another log probability: mean difference "
                f"{mean:.3g} over {self.repeats} repeats",
            )
        if self.prefixes >= MIN_TOKENS and self.overfull > max(1, OVERFULL_SHARE * self.prefixes):
            return Finding(
                "logprobs_contradict",
                f"different tokens after the same prefix have a probability above 1 in all, after "
                f"{self.overfull} of {self.prefixes} prefixes",
            )
        return None
