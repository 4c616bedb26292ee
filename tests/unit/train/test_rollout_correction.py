"""Weights and masks for a sampler that is not the trainer, on a recorded batch, by the formulas of their
sources, and once per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recorded_batch import Array, recorded_batch
from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.config import RolloutCorrectionConfig, parse_config
from tinkerscript.errors import ConfigError
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.trainers import to_training_datum
from tinkerscript.train.learner import divisors
from tinkerscript.train.token_advantages import correct, covariant_tokens

BATCH = recorded_batch()
MASK = BATCH.mask
RATIOS = np.where(MASK, np.exp(BATCH.old - BATCH.sampler), 1.0)
PRODUCTS = RATIOS.prod(1, keepdims=True).repeat(RATIOS.shape[1], 1)
MEANS = PRODUCTS ** (1 / BATCH.lengths[:, None])
CAP = float(np.quantile(RATIOS[MASK], 0.8))
LOW = float(np.quantile(RATIOS[MASK], 0.2))


def batch() -> list[WeightedRollout]:
    return [
        WeightedRollout.uniform(rollout, 1.0 + number)
        for group in BATCH.groups()
        for number, episode in enumerate(group.episodes)
        for rollout in episode.rollouts
    ]


def weights(**settings: Any) -> tuple[Array, dict[str, float]]:
    """What the advantage of each token is multiplied by, [E, R], and the metrics."""
    items, trainer = batch(), BATCH.of_sequences(BATCH.old)
    corrected, metrics = correct(items, trainer, RolloutCorrectionConfig.model_validate(settings))
    found = list[Any]()
    for item, before, old in zip(corrected, items, trainer, strict=True):
        assert item.reference is old
        assert to_training_datum(item).loss_fn_inputs["logprobs"].to_numpy().tolist() == old[1:].tolist()
        assert before.reference is None, "the batch is not changed"
        scale = before.advantages.max()
        assert not item.advantages[~item.rollout.loss_mask].any()
        found.append(item.advantages / scale)
    return BATCH.of_replies(found), metrics


def inside(values: Array, low: float, high: float) -> Array:
    return ((low <= values) & (values <= high)).astype(float)


LIMIT = float(np.median(PRODUCTS))
EXPECTED: dict[str, tuple[Any, Array]] = {
    "tis": (CAP, np.minimum(RATIOS, CAP)),
    "sequence_tis": (LIMIT, np.minimum(PRODUCTS, LIMIT)),
    "mis": (CAP, RATIOS * (RATIOS <= CAP)),
    "sequence_mis": (LIMIT, PRODUCTS * (PRODUCTS <= LIMIT)),
    "icepop": ([LOW, CAP], RATIOS * inside(RATIOS, LOW, CAP)),
    "token_mask": ([LOW, CAP], inside(RATIOS, LOW, CAP)),
    "sequence_mask": ([0.7, 1.2], inside(PRODUCTS, 0.7, 1.2)),
    "geometric_mask": ([0.95, 1.05], inside(MEANS, 0.95, 1.05)),
    "veto": ([0.6, 1.6], inside(RATIOS, 0.6, 1.6).min(1, keepdims=True) * np.ones_like(RATIOS)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_part_is_its_sources_formula(name: str) -> None:
    setting, expected = EXPECTED[name]
    found, metrics = weights(**{name: setting})
    np.testing.assert_allclose(found[MASK], expected[MASK], rtol=2e-6)
    raw = PRODUCTS if name.startswith("sequence_") else RATIOS
    touched = expected != raw if "is" in name or name == "icepop" else expected == 0
    share = float(touched[MASK].mean())
    assert 0.02 < share < 0.98, "the part acts on this batch"
    assert metrics == {
        "correction/weight": pytest.approx(expected[MASK].mean(), rel=1e-5),
        "correction/max_ratio": pytest.approx(RATIOS[MASK].max(), rel=1e-5),
        f"correction/{name}": pytest.approx(share, abs=1e-6),
    }


def test_a_weight_and_masks_are_multiplied() -> None:
    names = ("sequence_tis", "token_mask", "geometric_mask", "veto")
    found, metrics = weights(**{name: EXPECTED[name][0] for name in names})
    expected = np.prod([EXPECTED[name][1] for name in names], axis=0)
    np.testing.assert_allclose(found[MASK], expected[MASK], rtol=2e-6)
    assert {f"correction/{name}" for name in names} <= metrics.keys()


def test_a_ratio_beyond_all_numbers_is_a_number() -> None:
    items, trainer = batch(), BATCH.of_sequences(BATCH.old + 500)
    corrected, metrics = correct(items, trainer, RolloutCorrectionConfig(sequence_tis=2.0))
    assert all(np.isfinite(item.advantages).all() for item in corrected)
    assert np.isfinite(metrics["correction/max_ratio"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{tis: 2, icepop: [0.5, 5]}", "tis and icepop each weigh by the same ratio: give one, and any"),
        ("{bypass: true, tis: 2}", "bypass takes .* so tis would always find a ratio of 1"),
        ("{bypass: true, veto: [0, 9]}", "so veto would always find a ratio of 1"),
        ("{icepop: [5, 0.5]}", r"icepop: it must be \[low, high\]"),
        ("{method: mask}", "unknown key 'training.rollout_correction.method'"),
    ],
)
def test_parts_that_contradict_each_other_are_refused_by_name(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(f"training: {{rollout_correction: {given}}}", source="run.yaml")


@pytest.mark.parametrize("has_band", [False, True])
def test_covariant_tokens_are_chosen_over_the_whole_batch(has_band: bool) -> None:
    items = batch()
    advantages = BATCH.of_replies([item.advantages for item in items])[MASK]
    logprobs = BATCH.old[MASK]
    covariance = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    low, high = np.quantile(covariance, [0.4, 0.9]).tolist()
    band = (low, high) if has_band else None
    marks = covariant_tokens(items, BATCH.of_sequences(BATCH.old), share=0.1, band=band, seed="s")
    chosen = BATCH.of_replies(marks)[MASK] > 0
    assert chosen.sum() == int(0.1 * MASK.sum())
    if band is None:
        assert covariance[chosen].min() >= covariance[~chosen].max()
    else:
        assert ((covariance > band[0]) & (covariance < band[1]))[chosen].all()
        other = covariant_tokens(items, BATCH.of_sequences(BATCH.old), share=0.1, band=band, seed="t")
        assert any((one != two).any() for one, two in zip(marks, other, strict=True))


def test_a_minibatch_is_divided_by_its_sequences_its_tokens_or_both() -> None:
    episodes = [make_episode([make_call(None, [5], [7] * n)], n, f"e{n}") for n in (2, 3)]
    items = list(make_group(episodes).weighted())
    assert divisors(items, "sequences", episodes=8) == [2, 2]
    assert divisors(items, "tokens", episodes=8) == [5, 5]
    assert divisors(items, "tokens_then_sequences", episodes=8) == [4, 6]
    assert divisors(items, "episodes", episodes=8) == [8, 8]
