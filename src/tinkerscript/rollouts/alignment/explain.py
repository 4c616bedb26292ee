"""The report in words, for the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tinkerscript.rollouts.alignment.errors import ERRORS
from tinkerscript.rollouts.alignment.report import AlignmentReport
from tinkerscript.rollouts.alignment.warnings import WARNINGS


def explain(report: AlignmentReport) -> list[str]:
    """A line for each thing that a person should know, the worst first."""
    return [*_verdict(report), *_counted("warning", report.whole.warnings, WARNINGS), *_figures(report)]


def _verdict(report: AlignmentReport) -> Iterator[str]:
    for finding in report.findings:
        yield f"step {finding['step']}: {finding['name']}: {finding['detail']}"
    yield from _counted("not trained", report.whole.errors, ERRORS)
    if not report.findings and not report.whole.errors and report.whole.sequences:
        yield "clean: every sequence that was looked at is what was sampled"


def _counted(kind: str, counts: Mapping[str, int], meanings: Mapping[str, str]) -> Iterator[str]:
    for name, number in sorted(counts.items(), key=lambda item: -item[1]):
        yield f"{kind}, {number:,}x {name}: {meanings.get(name, name)}"


def _figures(report: AlignmentReport) -> Iterator[str]:
    whole = report.whole
    if whole.sequences:
        yield (
            f"{whole.tokens_sampled:,} tokens sampled, {whole.tokens_trained:,} trained, in "
            f"{whole.sequences_per_episode:.2f} sequences an episode; {whole.merge_ratio:.1f} times fewer "
            "tokens than separate calls"
        )
    for lag, gap in sorted(whole.gaps.items()):
        if gap.tokens:
            found = gap.metrics()
            yield (
                f"trainer against sampler, {lag} steps behind: mean |dlogp| {gap.mean_abs:.2g}, largest "
                f"{gap.max_abs:.2g}, effective sample size {found['effective_sample_size']:.3f}"
            )
