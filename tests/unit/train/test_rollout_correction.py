"""Weights for a sampler that is not the trainer, by the formulas of their sources, and once per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.config import RolloutCorrectionConfig
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import FloatArray
from tinkerscript.rollouts.trainers import to_training_datum
from tinkerscript.train.learner import divisors
from tinkerscript.train.token_advantages import correct

SAMPLER = [[-1.0, -2.0], [-0.5, -1.5, -3.0]]
GAPS = [[0.1, 1.5], [-0.2, 0.3, -2.0]]
"""log old - log q of each sampled token."""


def batch() -> tuple[list[WeightedRollout], list[FloatArray]]:
    episodes = [
        make_episode([make_call(None, [5, 6], [7] * len(logprobs), logprobs=logprobs)], reward, f"e{reward}")
        for reward, logprobs in zip((1.0, 0.0), SAMPLER, strict=True)
    ]
    items = list(make_group(episodes, "g").weighted())
    trainer = [
        np.array([0.0, 9.9, *np.add(logprobs, gaps)], np.float32)
        for logprobs, gaps in zip(SAMPLER, GAPS, strict=True)
    ]
    return items, trainer


def weights(**settings: Any) -> tuple[list[list[float]], dict[str, float]]:
    items, trainer = batch()
    corrected, metrics = correct(items, trainer, RolloutCorrectionConfig.model_validate(settings))
    for item, before, old in zip(corrected, items, trainer, strict=True):
        assert not item.advantages[:2].any()
        assert item.reference is old
        datum = to_training_datum(item).loss_fn_inputs
        assert datum["logprobs"].to_numpy().tolist() == old[1:].tolist()
        assert before.reference is None, "the batch is not changed"
    pairs = zip(corrected, items, strict=True)
    found = [(new.advantages[2:] / old.advantages[2:]).tolist() for new, old in pairs]
    return found, metrics


@pytest.mark.parametrize("cap", [2.0, 1.2])
def test_each_token_is_weighed_by_its_ratio_up_to_the_cap(cap: float) -> None:
    found, metrics = weights(method="truncate", cap=cap)
    expected = [[min(float(np.exp(gap)), cap) for gap in gaps] for gaps in GAPS]
    assert found == [pytest.approx(each, rel=1e-5) for each in expected]
    every = np.exp(np.concatenate(GAPS))
    assert metrics == {
        "correction/weight": pytest.approx(np.concatenate(expected).mean()),
        "correction/capped": pytest.approx((every > cap).mean()),
        "correction/max_ratio": pytest.approx(np.exp(1.5)),
    }


def test_a_token_above_the_cap_is_masked() -> None:
    found, _ = weights(method="mask", cap=2.0)
    assert found == [pytest.approx([np.exp(0.1), 0.0], rel=1e-5), pytest.approx(np.exp(GAPS[1]), rel=1e-5)]


@pytest.mark.parametrize(("method", "first"), [("truncate", 2.0), ("mask", 0.0)])
def test_a_sequence_is_weighed_by_the_product_of_its_ratios(method: str, first: float) -> None:
    found, metrics = weights(method=method, level="sequence", cap=2.0)
    assert found == [[first] * 2, pytest.approx([np.exp(-1.9)] * 3, rel=1e-5)]
    assert metrics["correction/max_ratio"] == pytest.approx(np.exp(1.6), rel=1e-5)
    assert metrics["correction/capped"] == pytest.approx(0.4)


def test_a_ratio_beyond_all_numbers_is_a_number() -> None:
    items, trainer = batch()
    trainer[0][2:] = 500.0
    config = RolloutCorrectionConfig(method="truncate", level="sequence")
    (first, _), metrics = correct(items, trainer, config)
    assert np.isfinite(first.advantages).all()
    assert np.isfinite(metrics["correction/max_ratio"])


def test_a_minibatch_is_divided_by_its_sequences_its_tokens_or_both() -> None:
    items, _ = batch()
    assert divisors(items, "sequences", episodes=8) == [2, 2]
    assert divisors(items, "tokens", episodes=8) == [5, 5]
    assert divisors(items, "tokens_then_sequences", episodes=8) == [4, 6]
    assert divisors(items, "episodes", episodes=8) == [8, 8]
