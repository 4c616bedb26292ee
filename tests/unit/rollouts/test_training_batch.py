"""Padded batches, and a reward's shares of tokens and what they return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.rollouts.advantages import (
    TrainingBatch,
    WeightedRollout,
    at_end,
    by_call,
    discounted,
    evenly,
)
from tinkerscript.rollouts.rollout import Rollout


def test_a_batch_holds_every_row_and_nothing_else() -> None:
    episodes = [make_episode(random_calls(i, turns=i + 1), float(i), f"e{i}") for i in range(3)]
    groups = (make_group(episodes, "a"), make_group(episodes[:2], "b"))
    weighted = [item for group in groups for item in group.weighted()]
    batch = TrainingBatch.of(weighted, pad_token_id=9, multiple_of=8)
    assert len(batch) == 5
    assert batch.input_ids.shape[1] % 8 == 0
    assert batch.attention_mask.sum(axis=1).tolist() == batch.lengths.tolist()
    for i, item in enumerate(weighted):
        n = batch.lengths[i]
        assert n == len(item.rollout.tokens)
        np.testing.assert_array_equal(batch.input_ids[i][:n], item.rollout.tokens)
        assert (batch.input_ids[i][n:] == 9).all()
        np.testing.assert_array_equal(batch.loss_masks[i][:n], item.rollout.sampled)
        np.testing.assert_array_equal(batch.loss_weights[i][:n], item.advantages)
        np.testing.assert_array_equal(batch.policy_logprobs[i][:n], item.rollout.logprobs)
    assert (batch.loss_weights[~batch.loss_masks] == 0).all()
    dtypes = [str(a.dtype) for a in (batch.input_ids, batch.loss_masks, batch.loss_weights)]
    assert dtypes == ["int32", "bool", "float32"]


def test_a_batch_never_cuts() -> None:
    (rollout,) = make_episode([make_call(None, [1, 2, 3], [4, 5])], name="long").rollouts
    item = WeightedRollout.uniform(rollout, 1.0)
    assert TrainingBatch.of([item], length=5).input_ids.tolist() == [[1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="episode long has 5 tokens, more than length=4"):
        TrainingBatch.of([item], length=4)
    with pytest.raises(ValueError, match="at least one rollout"):
        TrainingBatch.of([])


def two_turns() -> Rollout:
    """[1 2] 10 11 [3] 12"""
    first = make_call(None, [1, 2], [10, 11])
    (rollout,) = make_episode([first, make_call(first, [3], [12])]).rollouts
    return rollout


def test_a_number_is_every_tokens_return_and_shares_are_summed_from_the_token_on() -> None:
    rollout = two_turns()
    assert rollout.rewarded(0.5).returns.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    shaped = rollout.rewarded([0.25, 0.0, 0.0, 0.5])
    assert shaped.episode_reward == 0.75
    assert shaped.returns.tolist() == [0, 0, 0.75, 0.5, 0, 0.5]
    assert shaped.token_rewards.tolist() == [0.25, 0, 0, 0.5]


@pytest.mark.parametrize(
    ("reward", "shares"),
    [
        (lambda rollout: at_end(rollout, 6), [0, 0, 0, 6]),
        (lambda rollout: evenly(rollout, 6), [2, 2, 0, 2]),
        (lambda rollout: discounted(rollout, 7, 0.5), [1, 2, 0, 4]),
        (lambda rollout: by_call(rollout, [2, 4]), [0, 2, 0, 4]),
    ],
)
def test_shares_fall_on_sampled_tokens_and_sum_to_the_reward(reward: Any, shares: list[float]) -> None:
    rollout = two_turns()
    shaped = rollout.rewarded(reward(rollout))
    np.testing.assert_allclose(shaped.token_rewards, shares, rtol=1e-6)
    assert shaped.token_rewards.dtype == np.float32
    assert shaped.episode_reward == pytest.approx(sum(shares))


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(ValueError, match="1 rewards for 2 calls"):
        by_call(two_turns(), [1.0])
    for discount in (0.0, 1.5):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            discounted(two_turns(), 1.0, discount)
