"""`AlignmentCheck`: decides which sequences of a step may train, and whether the step may happen.

Off-policy samples should differ from the trainer, so they stop a step only if their logprobs belong to other
tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tinkerscript.config import TrainingConfig
from tinkerscript.engine.routing import Routing
from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.advantages import RolloutGroup, WeightedRollout
from tinkerscript.rollouts.alignment import AlignmentReport, find_errors, find_warnings
from tinkerscript.rollouts.alignment.diagnosis import (
    Contradictions,
    Finding,
    Gap,
    Pair,
    diagnose,
    is_comparable,
)
from tinkerscript.rollouts.call import FloatArray, IntArray, full_prompts
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.backends.backend import TrainerBackend

UNNAMED = "logprob_gap"
"""It can stop a step, but leaves no sequence out."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    vocabulary: int
    stop_ids: Collection[int] = ()
    tokenizer: str = ""
    retokenise: Callable[[IntArray], Sequence[int]] | None = None
    is_embedded: bool = True
    scales_logits: bool = True

    routing: Routing | None = None

    @classmethod
    def of(cls, folder: Path, backend: TrainerBackend, *, scales_logits: bool = True) -> TrainedModel:
        tokenizer = LightTokenizer(folder)
        eos = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

        def retokenise(ids: IntArray) -> list[int]:
            return tokenizer.encode(tokenizer.decode(ids.tolist()), add_special_tokens=False)

        return cls(
            vocabulary=backend.vocabulary,
            stop_ids={*backend.stop_ids, *eos},
            tokenizer=tokenizer.fingerprint,
            retokenise=retokenise,
            is_embedded=backend.scales_logits,
            scales_logits=backend.scales_logits and scales_logits,
            routing=backend.routing,
        )

    def takes_experts(self, rollout: Rollout) -> bool:
        if self.routing is None or rollout.experts is None:
            return True
        try:
            self.routing.unpacked(rollout.experts)
        except ValueError:
            return False
        return True


class AlignmentCheck:
    def __init__(self, report: AlignmentReport, config: TrainingConfig, model: TrainedModel) -> None:
        self._report = report
        self._config = config
        self._model = model
        self.left_out: set[str] = set()
        self.reasons: dict[int, str] = {}
        """`id(rollout)` -> why it failed."""

        self.noticed: Counter[tuple[str, str, str]] = Counter()

    def begin(self) -> None:
        self.left_out.clear()
        self.reasons.clear()
        self.noticed.clear()

    def _leave_out(self, rollout: Rollout, errors: Sequence[str]) -> None:
        self._report.add_errors(errors)
        self.left_out.add(rollout.episode_uuid)
        self.reasons[id(rollout)] = ", ".join(errors)
        self.noticed.update(("error", name, rollout.episode_uuid) for name in errors)

    def passed(self, group: RolloutGroup) -> bool:
        return self.left_out.isdisjoint(episode.episode_uuid for episode in group.episodes)

    def sound(self, group: RolloutGroup) -> RolloutGroup:
        return replace(group, episodes=tuple(self._sound(episode) for episode in group.episodes))

    def _sound(self, episode: EpisodeRollouts) -> EpisodeRollouts:
        prompts = full_prompts(episode.calls)
        sound: list[Rollout] = []
        for rollout in episode.rollouts:
            errors = find_errors(
                rollout,
                vocabulary=self._model.vocabulary,
                prompts=prompts,
                refuse_constrained=self._config.constrained_tokens == "refuse",
                scales_logits=self._model.scales_logits,
            )
            if not self._model.takes_experts(rollout):
                errors.append("experts_of_another_model")
            warnings = find_warnings(rollout, stop_ids=self._model.stop_ids, tokenizer=self._model.tokenizer)
            self._report.add_warnings(warnings)
            for name, count in warnings.items():
                self.noticed["warning", name, episode.episode_uuid] += count
            if errors:
                self._leave_out(rollout, errors)
            else:
                sound.append(rollout)
        return replace(episode, rollouts=tuple(sound))

    def siblings(self, groups: Iterable[RolloutGroup], *, step: int) -> None:
        """Raises AlignmentError, unless set to warn, if the sampler contradicts itself."""
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
        """Returns the sequences that may train. `trainer`: float32 [T] logprobs each, [0] unused.

        `lags`: policy version -> training steps behind (None: all current). Raises AlignmentError for
        misaligned lag-0 sequences, unless set to warn.
        """
        current = Gap()
        pairs: list[Pair] = []
        apart: list[Pair] = []
        older: list[Pair] = []
        kept: list[WeightedRollout] = []
        for item, logprobs in zip(items, trainer, strict=True):
            gap = self._measure(item.rollout, logprobs, lags)
            current.add(gap)
            older += self._pairs(item.rollout, logprobs, lags, is_older=True)
            suspects = self._pairs(item.rollout, logprobs, lags) if gap.mean_abs > self._limit else []
            finding = self._diagnose(suspects)
            pairs += suspects
            if finding is None or finding.name == UNNAMED:
                kept.append(item)
            else:
                apart += suspects
                self._leave_out(item.rollout, [finding.name])
        self._judge(current.mean_abs, pairs, apart, step)
        finding = self._diagnose(older)
        if finding and finding.name == "logprobs_shifted":
            self._misaligned(finding, step)
        return kept

    @property
    def _limit(self) -> float:
        return self._config.max_mean_dlogp

    def _measure(self, rollout: Rollout, trainer: FloatArray, lags: Mapping[int, int] | None) -> Gap:
        """Report the gaps by lag, and return the gap at lag 0."""
        behind = np.zeros(len(rollout.tokens), dtype=np.int32)
        compared = rollout.sampled.copy()
        for segment in rollout.segments:
            compared[segment.start : segment.end] = is_comparable(segment.call)
        present = {0}
        if lags is not None:
            for segment in rollout.segments:
                for version, span in segment.versions:
                    behind[span] = lags[version]
            present = set(behind[compared].tolist())
        current = Gap()
        for lag in sorted(present):
            mask = compared & (behind == lag)
            gap = Gap.between(rollout.logprobs[mask], trainer[mask])
            self._report.add_gap(lag, gap)
            if lag == 0:
                current = gap
        return current

    def _pairs(
        self,
        rollout: Rollout,
        trainer: FloatArray,
        lags: Mapping[int, int] | None,
        *,
        is_older: bool = False,
    ) -> list[Pair]:
        spans = [
            span
            for segment in rollout.segments
            if is_comparable(segment.call)
            for version, span in segment.versions
            if (lags is not None and lags[version] > 0) == is_older
        ]
        return [Pair(rollout.tokens[span], rollout.logprobs[span], trainer[span]) for span in spans]

    def _diagnose(self, pairs: Sequence[Pair]) -> Finding | None:
        return diagnose(pairs, threshold=self._limit, retokenise=self._model.retokenise)

    def _judge(self, mean: float, pairs: Sequence[Pair], apart: Sequence[Pair], step: int) -> None:
        finding = self._diagnose(pairs if mean > self._limit else apart)
        if finding:
            self._misaligned(finding, step)
        elif mean > self._limit / 2:
            self._report.add_warnings({"logprob_gap": 1})

    def _misaligned(self, finding: Finding, step: int) -> None:
        self._report.add_finding(finding, step=step)
        if self._config.on_misalignment == "stop":
            raise AlignmentError(
                f"step {step}: the trainer does not reproduce what was sampled: {finding.name}: "
                f"{finding.detail}. The weights are unchanged "
                "(training.on_misalignment: stop; `warn` continues)",
                name=finding.name,
            )
