"""`AlignmentCheck`: what of a step may train, and whether the step may be made at all.

Invariant: it runs before the first gradient of a step, so a step that is stopped has changed no weights. What
older weights sampled differs from the trainer for a good reason: it is measured apart, by policy lag, and
stops nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinkerscript.config import TrainingConfig
from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.advantages import AdvantageRule
from tinkerscript.rollouts.alignment import AlignmentReport, find_errors, find_warnings
from tinkerscript.rollouts.alignment.diagnosis import Contradictions, Finding, Gap, Pair, diagnose
from tinkerscript.rollouts.call import Call, FloatArray, IntArray, full_prompts
from tinkerscript.rollouts.rollout import Rollout, RolloutGroup, WeightedRollout

UNNAMED = "logprob_gap"
"""A finding without a pattern: it may stop a step, and keeps no single sequence from training."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What the check must know about the model."""

    vocabulary: int
    """Ids are in [0, vocabulary)."""

    stop_ids: Collection[int] = ()
    """Tokens that end a turn."""

    tokenizer: str = ""
    """Fingerprint of its tokenizer's vocabulary."""

    retokenise: Callable[[IntArray], Sequence[int]] | None = None
    """Ids of the text that ids decode to."""


class AlignmentCheck:
    """Looks at a step's groups, then at the trainer's log probabilities; counts in `report`."""

    def __init__(self, report: AlignmentReport, config: TrainingConfig, model: TrainedModel) -> None:
        self._report = report
        self._config = config
        self._model = model
        self._rule = advantage_rule(config)

    def sound(self, group: RolloutGroup) -> list[WeightedRollout]:
        """The group's sequences without errors, weighted."""
        wrong: set[int] = set()
        for episode in group.episodes:
            prompts = full_prompts(episode.calls)
            for rollout in episode.rollouts:
                errors = find_errors(rollout, vocabulary=self._model.vocabulary, prompts=prompts)
                self._report.add_errors(errors)
                self._report.add_warnings(
                    find_warnings(rollout, stop_ids=self._model.stop_ids, tokenizer=self._model.tokenizer)
                )
                if errors:
                    wrong.add(id(rollout))
        return [item for item in group.weighted(self._rule) if id(item.rollout) not in wrong]

    def siblings(self, groups: Iterable[RolloutGroup], *, step: int) -> None:
        """Compare the sampler with itself. Raises AlignmentError for contradictions, unless set to warn."""
        found = Contradictions()
        for group in groups:
            found.add(rollout for episode in group.episodes for rollout in episode.rollouts)
        finding = found.finding(threshold=self._limit)
        if finding:
            self._misaligned(finding, step)

    def compare(
        self,
        items: Sequence[WeightedRollout],
        trainer: Sequence[FloatArray],
        *,
        lags: Mapping[int, int] | None,
        step: int,
    ) -> list[WeightedRollout]:
        """The sequences that may train, by the trainer's log probabilities: float32 [T] each, [0] unused.

        `lags`: training steps by policy version; None: all are current. Raises AlignmentError when those at
        lag 0 are misaligned, unless configured to go on.
        """
        current = Gap()
        pairs: list[Pair] = []
        apart: list[Pair] = []
        kept: list[WeightedRollout] = []
        for item, logprobs in zip(items, trainer, strict=True):
            gap = self._measure(item.rollout, logprobs, lags)
            current.add(gap)
            suspects = self._pairs(item.rollout, logprobs, lags) if gap.mean_abs > self._limit else []
            finding = self._diagnose(suspects)
            pairs += suspects
            if finding is None or finding.name == UNNAMED:
                kept.append(item)
            else:
                apart += suspects
                self._report.add_errors([finding.name])
        self._judge(current.mean_abs, pairs, apart, step)
        return kept

    @property
    def _limit(self) -> float:
        return self._config.max_mean_dlogp

    def _measure(self, rollout: Rollout, trainer: FloatArray, lags: Mapping[int, int] | None) -> Gap:
        """Counts the sequence's gap by lag; the one at lag 0."""
        behind = np.zeros(len(rollout.tokens), dtype=np.int32)
        present = {0}
        if lags is not None:
            for segment in rollout.segments:
                behind[segment.start : segment.end] = _lag(segment.call, lags)
            present = set(behind[rollout.sampled].tolist())
        current = Gap()
        for lag in sorted(present):
            mask = rollout.sampled & (behind == lag)
            gap = Gap.between(rollout.logprobs[mask], trainer[mask])
            self._report.add_gap(lag, gap)
            if lag == 0:
                current = gap
        return current

    def _pairs(self, rollout: Rollout, trainer: FloatArray, lags: Mapping[int, int] | None) -> list[Pair]:
        """The calls at lag 0, each with both sides' log probabilities."""
        spans = [
            slice(segment.start, segment.end) for segment in rollout.segments if _lag(segment.call, lags) == 0
        ]
        return [Pair(rollout.tokens[span], rollout.logprobs[span], trainer[span]) for span in spans]

    def _diagnose(self, pairs: Sequence[Pair]) -> Finding | None:
        return diagnose(pairs, threshold=self._limit, retokenise=self._model.retokenise)

    def _judge(self, mean: float, pairs: Sequence[Pair], apart: Sequence[Pair], step: int) -> None:
        """`pairs`: of the sequences above the limit; `apart`: of those that show a pattern."""
        finding = self._diagnose(pairs if mean > self._limit else apart)
        if finding:
            self._misaligned(finding, step)
        elif mean > self._config.warn_mean_dlogp:
            self._report.add_warnings({"logprob_gap": 1})

    def _misaligned(self, finding: Finding, step: int) -> None:
        self._report.add_finding(finding, step=step)
        if self._config.on_misalignment == "stop":
            raise AlignmentError(
                f"step {step}: what would train is not what was sampled: {finding.name}: {finding.detail}. "
                "No weights were changed (training.on_misalignment: stop; `warn` goes on)",
                name=finding.name,
            )


def advantage_rule(config: TrainingConfig) -> AdvantageRule:
    """How the config compares the episodes of a group."""
    return AdvantageRule(config.advantage_baseline, config.advantage_scale)


def _lag(call: Call, lags: Mapping[int, int] | None) -> int:
    """Of the oldest weights that sampled a part of the call."""
    return max(lags[version] for version in call.policy_versions) if lags is not None else 0
