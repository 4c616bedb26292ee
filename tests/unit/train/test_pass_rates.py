"""pass@k: the share of k attempts at a sample of which one passes, over all ways to choose them."""

from __future__ import annotations

from itertools import combinations

import pytest

from rollout_helpers import make_accepted
from tinkerscript.train.pass_rates import pass_at, pass_metrics
from tinkerscript.trainer_link.messages import EpisodeAccepted


@pytest.mark.parametrize("attempts", range(1, 7))
def test_the_estimate_is_over_all_choices_of_k_attempts(attempts: int) -> None:
    for passed in range(attempts + 1):
        results = [True] * passed + [False] * (attempts - passed)
        for k in range(1, attempts + 1):
            chosen = list(combinations(results, k))
            assert pass_at(k, attempts, passed) == pytest.approx(sum(map(any, chosen)) / len(chosen))


def attempts_at(sample: str, *rewards: float) -> list[EpisodeAccepted]:
    return [make_accepted(f"{sample}{i}", reward, group_id=sample) for i, reward in enumerate(rewards)]


def test_samples_count_alike_and_those_with_too_few_results_not_at_all() -> None:
    accepted = attempts_at("a", 1, 0, 0) + attempts_at("b", 0, 0, 0) + attempts_at("c", 1, 1)
    found = pass_metrics(accepted, 3, 1.0)
    assert found["eval/pass@1"] == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert found["eval/pass@2"] == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert found["eval/pass@3"] == pytest.approx((1 + 0) / 2), "an episode of c has failed"
    assert found["eval/pass@3_margin"] == pytest.approx(1.96 * 0.5**0.5 / 2**0.5, rel=1e-3)
    assert pass_metrics(accepted, 1, 1.0) == {}
    assert pass_metrics(accepted, 3, 0.0)["eval/pass@1"] == 1.0
