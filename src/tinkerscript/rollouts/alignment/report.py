from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tinkerscript.rollouts.alignment.checks import ERRORS, WARNINGS
from tinkerscript.rollouts.alignment.diagnosis import Finding, Gap
from tinkerscript.rollouts.call import TokenConstraint
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout


@dataclass
class Counts:
    episodes: int = 0
    sequences: int = 0
    calls: int = 0
    truncated: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    tokens_total: int = 0
    side_calls: int = 0
    """Calls outside of an agent's work."""

    tokens_unmerged: int = 0
    """The calls' tokens, each with its full prompt."""

    errors: Counter[str] = field(default_factory=Counter[str])
    warnings: Counter[str] = field(default_factory=Counter[str])
    forks: Counter[str] = field(default_factory=Counter[str])
    ids_from: Counter[str] = field(default_factory=Counter[str])
    logprob_kinds: Counter[str] = field(default_factory=Counter[str])
    constrained: Counter[str] = field(default_factory=Counter[str])
    ignored: Counter[str] = field(default_factory=Counter[str])
    """Calls by fields without effect."""

    gaps: dict[int, Gap] = field(default_factory=dict[int, Gap])
    """By policy lag in training steps."""

    def add_episode(self, episode: EpisodeRollouts) -> None:
        self.episodes += 1
        self.sequences += len(episode.rollouts)
        self.forks.update(call.fork_reason for call in episode.calls if call.fork_reason)
        for rollout in episode.rollouts:
            self.tokens_total += len(rollout.tokens)
            for segment in rollout.segments:
                sampled = segment.end - segment.start
                self.calls += 1
                self.truncated += segment.call.stop_reason == "length"
                self.side_calls += segment.call.side
                self.ignored.update(segment.call.ignored)
                self.tokens_sampled += sampled
                self.tokens_unmerged += segment.end
                self.ids_from[segment.call.ids_from] += sampled
                self.logprob_kinds[segment.call.logprob_kind] += sampled
                self.constrained.update(
                    TokenConstraint(kind).name.lower() for kind in segment.call.constrained if kind
                )

    def add_gap(self, lag: int, gap: Gap) -> None:
        self.gaps.setdefault(lag, Gap()).add(gap)

    @property
    def sequences_per_episode(self) -> float:
        return self.sequences / self.episodes if self.episodes else 0.0

    @property
    def merge_ratio(self) -> float:
        """Tokens of separate calls per token of merged sequences."""
        return self.tokens_unmerged / self.tokens_total if self.tokens_total else 0.0

    @property
    def at_lag_0(self) -> Gap:
        return self.gaps.get(0, Gap())

    def metrics(self) -> dict[str, float]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        found = {name: float(value) for name, value in values.items() if isinstance(value, int)}
        del found["tokens_unmerged"]
        found["sequences_per_episode"] = self.sequences_per_episode
        found["merge_ratio"] = self.merge_ratio
        found |= self.at_lag_0.metrics()
        for lag, gap in sorted(self.gaps.items()):
            if lag:
                found |= {f"lag_{lag}/{name}": value for name, value in gap.metrics().items()}
        for name, counter in (("errors", self.errors), ("warnings", self.warnings), ("forks", self.forks)):
            found |= {f"{name}/{key}": float(number) for key, number in counter.items()}
        for name in ("ids_from", "logprob_kinds", "constrained"):
            found |= {f"{name}/{key}": number / self.tokens_sampled for key, number in values[name].items()}
        return {f"alignment/{name}": value for name, value in found.items()}

    def as_json(self) -> dict[str, object]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: value if isinstance(value, int) else dict(value) for name, value in values.items()}
        return {**plain, "gaps": {str(lag): gap.as_json() for lag, gap in sorted(self.gaps.items())}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Counts:
        kinds = {each.name: type(getattr(cls(), each.name)) for each in fields(cls)}
        counts = cls(**{name: kind(data[name]) for name, kind in kinds.items() if name in data})
        counts.gaps = {int(lag): Gap.from_json(gap) for lag, gap in data.get("gaps", {}).items()}
        return counts


class AlignmentReport:
    def __init__(self) -> None:
        self.whole = Counts()
        self.step = Counts()
        self.findings: list[dict[str, object]] = []
        """Each misaligned step's `step`, `name` and `detail`."""

    def begin_step(self) -> None:
        self.step = Counts()

    @property
    def _both(self) -> tuple[Counts, Counts]:
        return self.whole, self.step

    def add_episode(self, episode: EpisodeRollouts) -> None:
        for counts in self._both:
            counts.add_episode(episode)

    def add_errors(self, errors: Iterable[str]) -> None:
        named = list(errors)
        for counts in self._both:
            counts.errors.update(named)

    def add_warnings(self, warnings: Mapping[str, int]) -> None:
        for counts in self._both:
            counts.warnings.update(warnings)

    def add_finding(self, finding: Finding, *, step: int) -> None:
        self.findings.append({"step": step, "name": finding.name, "detail": finding.detail})

    def add_gap(self, lag: int, gap: Gap) -> None:
        for counts in self._both:
            counts.add_gap(lag, gap)

    def add_trained(self, rollout: Rollout) -> None:
        for counts in self._both:
            counts.tokens_trained += int(rollout.loss_mask.sum())

    @property
    def tokens_trained(self) -> int:
        return self.whole.tokens_trained

    @property
    def sequences_per_episode(self) -> float:
        return self.whole.sequences_per_episode

    @property
    def max_abs_dlogp(self) -> float:
        return self.whole.at_lag_0.max_abs

    def as_json(self) -> dict[str, object]:
        return {
            **self.whole.as_json(),
            "sequences_per_episode": self.sequences_per_episode,
            "merge_ratio": self.whole.merge_ratio,
            "max_abs_dlogp": self.max_abs_dlogp,
            "mean_abs_dlogp": self.whole.at_lag_0.mean_abs,
            "findings": self.findings,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AlignmentReport:
        report = cls()
        report.whole = Counts.from_json(data)
        report.findings = list(data.get("findings", []))
        return report


def explain(report: AlignmentReport) -> list[str]:
    return [*_verdict(report), *_counted("warning", report.whole.warnings, WARNINGS), *_figures(report)]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({number:,})" for name, number in counts.most_common())


def constrained_share(counts: Counts) -> str:
    number, kinds = counts.constrained.total(), sorted(counts.constrained.items())
    return (
        f"{number:,} of {counts.tokens_sampled:,} sampled tokens ({number / counts.tokens_sampled:.0%}) were "
        f"constrained by a grammar: {', '.join(f'{count:,} {kind}' for kind, count in kinds)}"
    )


def _verdict(report: AlignmentReport) -> Iterator[str]:
    for finding in report.findings:
        yield f"step {finding['step']}: {finding['name']}: {finding['detail']}"
    yield from _counted("not trained", report.whole.errors, ERRORS)
    if not report.findings and not report.whole.errors and report.whole.sequences:
        yield "clean: every sequence is exactly what was sampled"


def _counted(kind: str, counts: Mapping[str, int], meanings: Mapping[str, str]) -> Iterator[str]:
    for name, number in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"{kind}, {number:,}x {name}: {meanings.get(name, name)}"


MERGED = 1.05  # With one call per episode there is nothing to merge.


def _figures(report: AlignmentReport) -> Iterator[str]:
    whole = report.whole
    if whole.sequences:
        fewer = f"{whole.merge_ratio:.1f} times fewer tokens than separate calls"
        yield (
            f"{whole.tokens_sampled:,} tokens sampled, {whole.tokens_trained:,} trained, in "
            f"{whole.sequences_per_episode:.2f} sequences per episode"
            + (f"; {fewer}" if whole.merge_ratio >= MERGED else "")
        )
    if whole.constrained:
        yield constrained_share(whole)
    if whole.forks:
        yield f"sequences that extend no earlier one: {_listed(whole.forks)}"
    if whole.side_calls:
        yield f"{whole.side_calls:,} of {whole.calls:,} calls were an agent's side calls"
    if whole.ignored:
        yield f"accepted without effect, in calls: {_listed(whole.ignored)}"
    for lag, gap in sorted(whole.gaps.items()):
        if gap.tokens:
            found = gap.metrics()
            yield (
                f"trainer vs. sampler at policy lag {lag}: mean |dlogp| {gap.mean_abs:.2g}, max "
                f"{gap.max_abs:.2g}, effective sample size {found['effective_sample_size']:.3f}"
            )
