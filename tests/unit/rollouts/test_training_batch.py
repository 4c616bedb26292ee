"""Padded batches, returns and advantages."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.rollouts.advantages import TrainingBatch, WeightedRollout
from tinkerscript.rollouts.rollout import EpisodeRollouts


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
    assert [a.dtype for a in (batch.input_ids, batch.loss_masks, batch.loss_weights)] == [
        np.dtype("int32"),
        np.dtype("bool"),
        np.dtype("float32"),
    ]


def test_a_batch_never_cuts() -> None:
    (rollout,) = make_episode([make_call(None, [1, 2, 3], [4, 5])], name="long").rollouts
    item = WeightedRollout.uniform(rollout, 1.0)
    assert TrainingBatch.of([item], length=5).input_ids.tolist() == [[1, 2, 3, 4, 5]]
    with pytest.raises(ValueError, match="episode long has 5 tokens, more than length=4"):
        TrainingBatch.of([item], length=4)
    with pytest.raises(ValueError, match="at least one rollout"):
        TrainingBatch.of([])


def test_a_number_is_every_tokens_return_and_shares_are_summed_from_the_token_on() -> None:
    first = make_call(None, [1, 2], [10, 11])
    (rollout,) = make_episode([first, make_call(first, [3], [12])]).rollouts
    assert rollout.rewarded(0.5).returns.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    shaped = rollout.rewarded([0.25, 0.0, 0.0, 0.5])
    assert shaped.episode_reward == 0.75
    assert shaped.returns.tolist() == [0, 0, 0.75, 0.5, 0, 0.5]
    assert shaped.token_rewards.tolist() == [0.25, 0, 0, 0.5]


def test_a_tokens_advantage_is_its_return_above_the_groups_mean() -> None:
    first = make_call(None, [1, 2], [10, 11])
    plain = make_episode([first, make_call(first, [3], [12])], reward=0.75)
    shaped = EpisodeRollouts("s", 0.75, (plain.rollouts[0].rewarded([0.25, 0.0, 0.0, 0.5]),))
    zero = make_episode([make_call(None, [1], [2])], reward=0.0, name="z")
    by_token, by_episode, worst = make_group([shaped, plain, zero]).weighted()
    assert by_token.advantages.tolist() == [0, 0, 0.25, 0, 0, 0]
    assert by_episode.advantages.tolist() == [0, 0, 0.25, 0.25, 0, 0.25]
    assert (by_token.scalar, by_episode.scalar, worst.scalar) == (None, 0.25, -0.5)
    np.testing.assert_allclose(by_episode.scaled(0.1).advantages[2], 0.025)
