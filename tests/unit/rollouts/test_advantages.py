"""How the rewards of a group become advantages, returns and shares of tokens, and the batches of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st

from recorded_batch import recorded_batch
from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.rollouts.advantages import (
    AdvantageRule,
    Moments,
    Past,
    RolloutGroup,
    SampleMean,
    TrainingBatch,
    WeightedRollout,
    at_end,
    by_call,
    discounted,
    evenly,
    whitened,
)
from tinkerscript.rollouts.rollout import EpisodeRollouts, Rollout

LEAVE_ONE_OUT = AdvantageRule("leave_one_out")
BY_DEVIATION = AdvantageRule(scale="group_deviation")


def group(*rewards: float) -> RolloutGroup:
    return make_group(
        [make_episode([make_call(None, [1], [2, 3])], r, f"e{i}") for i, r in enumerate(rewards)]
    )


@pytest.mark.parametrize("reward", [1.7e308, -1.1e6, float("nan"), float("inf")])
def test_a_reward_that_training_could_not_bear_is_in_no_group_and_on_no_rollout(reward: float) -> None:
    with pytest.raises(ValueError, match="at most 1e\\+06"):
        group(1.0, reward)
    (rollout,) = group(1.0).episodes[0].rollouts
    with pytest.raises(ValueError, match="at most 1e\\+06"):
        rollout.rewarded(reward)
    assert rollout.rewarded(-1e6).episode_reward == -1e6


def test_a_rule_by_hand() -> None:
    both = group(1.0, 0.0, 0.0, 1.0).advantages(AdvantageRule("leave_one_out", "group_deviation"))
    np.testing.assert_allclose(both, np.array([2, -2, -2, 2]) / 3 / np.sqrt(1 / 3), rtol=1e-5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_the_rules_agree_up_to_a_factor_and_equal_rewards_give_nothing(rewards: list[float]) -> None:
    made, size = group(*rewards), len(rewards)
    plain = made.advantages().astype(np.float64)
    assert abs(plain.sum()) < 1e-4
    np.testing.assert_allclose(made.advantages(LEAVE_ONE_OUT), plain * size / (size - 1), atol=1e-4)
    scaled = made.advantages(BY_DEVIATION)
    assert np.isfinite(scaled).all()
    if max(rewards) == min(rewards):
        for rule in (AdvantageRule(), LEAVE_ONE_OUT, BY_DEVIATION):
            assert not made.advantages(rule).any()
    elif max(rewards) - min(rewards) > 0.1:
        assert np.std(scaled, ddof=1) == pytest.approx(1, rel=1e-3)


def test_the_groups_mean_is_tinker_cookbooks() -> None:
    from tinker_cookbook.rl.data_processing import compute_advantages
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup

    rewards = [0.3, -1.0, 2.5, 2.5]
    trajectories = [Trajectory([], tinker.ModelInput.empty()) for _ in rewards]
    [theirs] = compute_advantages([TrajectoryGroup(trajectories, rewards, [{}] * 4)])
    np.testing.assert_allclose(group(*rewards).advantages(), theirs.numpy(), atol=1e-6)


def test_shares_of_a_reward_follow_the_rule_too() -> None:
    """Two episodes, rewards 3 and 1; the first gives 1 to its first token and 2 to its second."""
    first, second = make_call(None, [1], [2, 3]), make_call(None, [1], [4, 5])
    shaped = make_episode([first], 3.0, "a")
    shaped = EpisodeRollouts("a", 3.0, tuple(r.rewarded([1.0, 2.0]) for r in shaped.rollouts))
    made = make_group([shaped, make_episode([second], 1.0, "b")])
    plain, _ = made.weighted()
    np.testing.assert_allclose(plain.advantages, [0, 3 - 2, 2 - 2])
    others, flat = made.weighted(LEAVE_ONE_OUT)
    np.testing.assert_allclose(others.advantages, [0, 3 - 1, 2 - 1])
    np.testing.assert_allclose(flat.advantages, [0, 1 - 3, 1 - 3])
    scaled, _ = made.weighted(BY_DEVIATION)
    np.testing.assert_allclose(scaled.advantages, np.array([0, 1, 0]) / np.sqrt(2), rtol=1e-5)


def test_one_episode_cannot_leave_itself_out() -> None:
    with pytest.raises(ValueError, match="group of two"):
        LEAVE_ONE_OUT.baselines([1.0])


def test_rewarded_sequences_are_an_episode() -> None:
    first = make_call(None, [1], [2])
    sequences = make_episode([first, make_call(first, [3], [4]), make_call(None, [1], [5])]).rollouts
    rewarded = [rollout.rewarded(0.5, "env", "ex") for rollout in sequences]
    episode = EpisodeRollouts.of(rewarded)
    assert (episode.episode_uuid, episode.reward, len(episode.rollouts)) == ("e", 0.5, 2)
    assert len(episode.calls) == 3
    for wrong in ([], [rewarded[0], sequences[1].rewarded(1.0)]):
        with pytest.raises(ValueError, match="one episode has one uuid and one reward"):
            EpisodeRollouts.of(wrong)


def test_maxrl_divides_by_the_mean_reward() -> None:
    """Tajwar et al. 2026, whose estimator averages over the successes alone: (r - mean) / mean."""
    rule = AdvantageRule(scale="group_mean")
    np.testing.assert_allclose(group(1, 0, 0, 0).advantages(rule), [3, -1, -1, -1], rtol=1e-5)
    np.testing.assert_allclose(group(1, 1, 1, 0).advantages(rule), [1 / 3, 1 / 3, 1 / 3, -1], rtol=1e-5)
    # A client's negative rewards end nobody's run: nothing is relative to such a mean.
    assert group(-1.0, 0.0).advantages(rule).tolist() == [0.0, 0.0]


def by_subsets(rewards: list[float], k: int) -> np.ndarray:
    """The mean over all sets of k of: the best reward, less its mean over all sets, over its deviation."""
    best = {members: max(rewards[i] for i in members) for members in combinations(range(len(rewards)), k)}
    mean, deviation = np.mean(list(best.values())), np.std(list(best.values()))
    of = [np.mean([value for members, value in best.items() if i in members]) for i in range(len(rewards))]
    return (np.array(of) - mean) / deviation


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_k_compares_the_best_of_all_sets(k: int) -> None:
    rule = AdvantageRule(scale="group_deviation", pass_k=k)
    random = np.random.default_rng(k)
    for rewards in ([1, 0, 0, 0, 1, 0], [0.0, 0, 0, 0, 0, 2], random.normal(size=6).round(2).tolist()):
        found = group(*rewards).advantages(rule)
        np.testing.assert_allclose(found, by_subsets(rewards, k), rtol=1e-4, atol=1e-5)
    assert not group(1.0, 1.0, 1.0, 1.0).advantages(rule).any()


def test_a_batch_is_whitened_over_its_tokens() -> None:
    """The mean and the sample deviation over all tokens that train, as verl's and OpenRLHF's."""
    batch = recorded_batch()
    items = [
        WeightedRollout.uniform(rollout, episode.reward)
        for each in batch.groups()
        for episode in each.episodes
        for rollout in episode.rollouts
    ]
    found = batch.of_replies([item.advantages for item in whitened(items)])
    rewards = np.where(batch.mask, batch.rewards[:, None], 0.0)
    trained = rewards[batch.mask]
    expected = (rewards - trained.mean()) / trained.std(ddof=1)
    np.testing.assert_allclose(found[batch.mask], expected[batch.mask], atol=1e-6)
    assert not found[~batch.mask].any()


def test_without_a_baseline_equal_rewards_count_against_the_batch() -> None:
    rule = AdvantageRule("none", "batch_deviation")
    assert group(1.0, 1.0).advantages(rule).tolist() == [1.0, 1.0]
    assert rule.spans_groups


def test_gdpo_divides_each_score_by_its_own_deviation() -> None:
    correct, format_ = [1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]
    episodes = [
        EpisodeRollouts(f"e{i}", 0.5, (), scores={"correct": c, "format": f})
        for i, (c, f) in enumerate(zip(correct, format_, strict=True))
    ]
    made = make_group(episodes)
    assert made.rewards_differ, "the rewards are equal, the scores are not"
    found = made.advantages(AdvantageRule(weights={"correct": 1.0, "format": 0.25}))
    parts = [(np.array(r) - np.mean(r)) / np.std(r, ddof=1) for r in (correct, format_)]
    np.testing.assert_allclose(found, parts[0] + 0.25 * parts[1], rtol=1e-5)


# Beyond the group


def test_running_moments_are_those_of_all_rewards_so_far() -> None:
    random = np.random.default_rng(3)
    steps = [random.normal(5, 0.1, size).tolist() for size in (1, 7, 0, 64)]
    moments, every = Moments(), list[float]()
    for rewards in steps:
        moments, every = moments.adding(rewards), every + rewards
    assert moments.count == len(every) == 72
    assert moments.mean == pytest.approx(np.mean(every), rel=1e-14)
    assert moments.deviation == pytest.approx(np.std(every, ddof=1), rel=1e-12)
    assert Moments().adding([0.5]).adding([0.5, 0.5]).deviation == 1.0, "equal rewards are not scaled"


def test_the_mean_of_a_sample_is_spos_tracker() -> None:
    """alpha = rho alpha + r and beta = rho beta + (1 - r) for each visit, with v = alpha / (alpha + beta)."""
    rho, alpha, beta, found = 0.875, 0.0, 0.0, SampleMean()
    for reward in (1.0, 0.0, 0.0, 1.0, 1.0):
        alpha, beta = rho * alpha + reward, rho * beta + (1 - reward)
        found = found.adding([reward])
        assert found.mean == pytest.approx(alpha / (alpha + beta), rel=1e-12)
    pairs = SampleMean().adding([1.0, 0.0]).adding([1.0, 1.0])
    assert pairs.mean == pytest.approx((rho * 1 + 2) / (rho * 2 + 2), rel=1e-12)


def test_rewards_of_the_past_are_baseline_and_scale() -> None:
    past = Past(mean=0.25, deviation=0.5)
    equal = replace(group(1.0, 1.0), past=past)
    for baseline in ("running_mean", "sample_mean"):
        rule = AdvantageRule(baseline, "running_deviation")
        assert rule.spans_groups
        np.testing.assert_allclose(equal.advantages(rule), [1.5, 1.5], rtol=1e-5)
        (item, *_) = equal.weighted(rule)
        np.testing.assert_allclose(item.advantages, [0, 1.5, 1.5], rtol=1e-5)
        np.testing.assert_allclose(equal.advantages(AdvantageRule(baseline)), [0.75, 0.75])
    differing = replace(group(1.0, 0.0), past=past)
    np.testing.assert_allclose(
        differing.advantages(AdvantageRule(scale="running_deviation")), [1.0, -1.0], rtol=1e-5
    )
    assert not AdvantageRule(scale="running_deviation").spans_groups
    assert not equal.advantages(AdvantageRule(scale="running_deviation")).any()
    with pytest.raises(ValueError, match="has no running_mean"):
        group(1.0, 0.0).advantages(AdvantageRule("running_mean"))


# Padded batches, and the shares of tokens in a reward


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
