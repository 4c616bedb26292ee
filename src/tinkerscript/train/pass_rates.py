"""Which episodes pass, and unbiased estimates of pass@k (Chen et al. 2021, arXiv:2107.03374).

Intervals are over samples, because attempts at one sample are correlated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import comb

from tinkerscript.ledger.health import margin_of
from tinkerscript.trainer_link.messages import EpisodeAccepted


def passes(outcome: EpisodeAccepted, pass_reward: float) -> bool:
    """An episode's own report takes precedence over its reward."""
    return outcome.is_success if outcome.is_success is not None else outcome.reward >= pass_reward


def pass_at(k: int, attempts: int, passed: int) -> float:
    return 1.0 - comb(attempts - passed, k) / comb(attempts, k)


def by_sample(accepted: Iterable[EpisodeAccepted]) -> list[list[EpisodeAccepted]]:
    found = defaultdict[str, list[EpisodeAccepted]](list)
    for outcome in accepted:
        found[outcome.group_id].append(outcome)
    return list(found.values())


def pass_metrics(accepted: Iterable[EpisodeAccepted], attempts: int, pass_reward: float) -> dict[str, float]:
    """`eval/pass@k` for k = 1, 2, 4, ... and `attempts`, over samples with k results, and half of its 95%
    interval, `eval/pass@k_margin`. Empty for a single attempt.
    """
    metrics = dict[str, float]()
    powers = [1 << exponent for exponent in range(attempts.bit_length())]
    for k in sorted({*powers, attempts}) if attempts > 1 else ():
        estimates = [
            pass_at(k, len(sample), sum(passes(each, pass_reward) for each in sample))
            for sample in by_sample(accepted)
            if len(sample) >= k
        ]
        if estimates:
            metrics[f"eval/pass@{k}"] = sum(estimates) / len(estimates)
        if len(estimates) > 1:
            metrics[f"eval/pass@{k}_margin"] = margin_of(estimates)
    return metrics
