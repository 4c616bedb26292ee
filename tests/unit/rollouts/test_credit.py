"""What each call earned, and what that is compared with: turns, repeated states, and the bias of each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollout_helpers import make_call, make_episode, make_group, random_calls
from tinkerscript.rollouts.advantages import AdvantageRule, RolloutGroup
from tinkerscript.rollouts.call import Call
from tinkerscript.rollouts.credit import Credit, returns_of, rewards_of_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts

LEAVE_ONE_OUT = AdvantageRule("leave_one_out")


def episode(
    name: str, own: list[float], rest: float = 0.0, calls: list[Call] | None = None
) -> EpisodeRollouts:
    """An episode whose calls earn `own`, and `rest` for the whole of it."""
    calls = calls or conversation(len(own), seed=sum(map(ord, name)))
    made = make_episode(calls, sum(own) + rest, name)
    made.call_rewards.update(
        {call.call_id: reward for call, reward in zip(calls, own, strict=True) if reward}
    )
    return made


def conversation(turns: int, *, seed: int = 0) -> list[Call]:
    return random_calls(seed, turns=turns)


def token_advantages(group: RolloutGroup, credit: Credit, rule: AdvantageRule | None = None) -> list[float]:
    """Of the first sampled token of each call, in order."""
    return [
        float(item.advantages[segment.start])
        for item in credit.weighted(group, rule or AdvantageRule())
        for segment in item.rollout.segments
    ]


def test_a_reward_counts_for_its_call_and_those_before_it() -> None:
    rewards = np.array([0.0, 1.0, 0.0, 2.0])
    np.testing.assert_allclose(returns_of(rewards, 1.0), [3, 3, 2, 2])
    np.testing.assert_allclose(returns_of(rewards, 0.5), [0.75, 1.5, 1.0, 2.0])


def test_the_last_call_earned_what_no_call_is_said_to_have() -> None:
    made = episode("e", [0.0, 0.3, 0.0], rest=1.0)
    np.testing.assert_allclose(rewards_of_calls(made), [0.0, 0.3, 1.0])
    np.testing.assert_allclose(rewards_of_calls(make_episode(conversation(2), 0.7)), [0.0, 0.7])


def test_a_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    """The first and second call of one episode earned what the other's did not; their last ones are alike."""
    group = make_group([episode("a", [0.0, 1.0, 0.0]), episode("b", [0.0, 0.0, 0.0])])
    np.testing.assert_allclose(token_advantages(group, Credit()), [0.5, 0.5, 0, -0.5, -0.5, 0], atol=1e-6)
    np.testing.assert_allclose(token_advantages(group, Credit("episode")), [0.5] * 3 + [-0.5] * 3, atol=1e-6)
    np.testing.assert_allclose(
        token_advantages(group, Credit(), LEAVE_ONE_OUT), [1, 1, 0, -1, -1, 0], atol=1e-6
    )


def test_equal_sums_train_where_single_calls_differ() -> None:
    group = make_group([episode("a", [1.0, 0.0]), episode("b", [0.0, 1.0])])
    assert not group.rewards_differ
    assert Credit().differs(group)
    assert not Credit("episode").differs(group)
    np.testing.assert_allclose(token_advantages(group, Credit()), [0, -0.5, 0, 0.5], atol=1e-6)
    same = make_group([episode("a", [1.0, 0.0]), episode("b", [1.0, 0.0])])
    assert not Credit().differs(same)
    assert token_advantages(same, Credit()) == [0.0] * 4


@pytest.mark.parametrize(
    "rule", [AdvantageRule(), LEAVE_ONE_OUT, AdvantageRule("group_mean", "group_deviation")]
)
def test_without_rewards_of_calls_nothing_changes(rule: AdvantageRule) -> None:
    group = make_group(
        [make_episode(random_calls(i, turns=3, forks=1), float(i % 3), f"{i}") for i in range(5)]
    )
    for level in ("episode", "turn"):
        ours, theirs = Credit(level).weighted(group, rule), group.weighted(rule)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.advantages, other.advantages)


def test_sets_of_episodes_are_compared_as_a_whole() -> None:
    """A call has no pass@k, and no scores by name."""
    group = make_group([episode("a", [1.0, 0.0]), episode("b", [0.0, 0.5]), episode("c", [0.0, 0.0])])
    rule = AdvantageRule(pass_k=2)
    for ours, theirs in zip(Credit().weighted(group, rule), group.weighted(rule), strict=True):
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)


def test_without_a_baseline_the_returns_themselves_train() -> None:
    """REINFORCE++ compares them across groups, so equal ones count too."""
    group = make_group([episode("a", [1.0, 0.5]), episode("b", [1.0, 0.5])])
    rule = AdvantageRule("none", "batch_deviation")
    np.testing.assert_allclose(token_advantages(group, Credit(), rule), [1.5, 0.5] * 2)


def test_a_later_sequence_counts_for_an_earlier_one() -> None:
    """A program that starts a new conversation, such as one that compacts its history."""
    first = conversation(2)
    later = [make_call(None, [40, 41], [42, 43])]
    group = make_group([episode("a", [0.0, 0.0, 1.0], calls=[*first, *later]), episode("b", [0.0, 0.0, 0.0])])
    assert len(group.episodes[0].rollouts) == 2
    np.testing.assert_allclose(token_advantages(group, Credit())[:3], [0.5, 0.5, 0.5])


def test_calls_that_were_shown_the_same_are_compared() -> None:
    """GiGPO: A_E + A_S, where A_S is over the returns of the calls with one anchor state."""

    def walk(states: list[int], reward: float, name: str) -> EpisodeRollouts:
        calls: list[Call] = []
        for state in states:
            calls.append(make_call(calls[-1] if calls else None, [state], [7]))
        return make_episode(calls, reward, name)

    group = make_group([walk([1, 2, 3], 1.0, "a"), walk([1, 3], 0.0, "b"), walk([1, 4, 2], 0.0, "c")])
    credit = Credit("state", discount=0.5)
    # Returns: a: 1/4, 1/2, 1; b and c: 0. The states 1 (all three), 2 (a's second, c's third), 3 (a's third,
    # b's second) repeat; 4 does not.
    whole = np.array([2 / 3, -1 / 3, -1 / 3])
    expected = [
        [whole[0] + 1 / 4 - 1 / 12, whole[0] + 1 / 4, whole[0] + 1 / 2],
        [whole[1] - 1 / 12, whole[1] - 1 / 2],
        [whole[2] - 1 / 12, whole[2], whole[2] - 1 / 4],
    ]
    np.testing.assert_allclose(token_advantages(group, credit), list(itertools.chain(*expected)), rtol=1e-6)


def test_what_too_few_reached_has_nothing_to_be_compared_with() -> None:
    group = make_group([episode("a", [0.0, 1.0, 1.0]), episode("b", [0.0])])
    np.testing.assert_allclose(token_advantages(group, Credit()), [1.0, 0, 0, -1.0], atol=1e-6)


def expected_gradient(credit: Credit, rule: AdvantageRule, size: int) -> float:
    """E[sum over calls of advantage * d log p / d theta], exactly, of a policy that stops with probability
    1/2 after its first turn; each turn earns 1. theta is the logit of going on, at 0, so d log p / d theta is
    1/2 for going on and -1/2 for stopping. A turn that is not the first has no choice."""
    total = 0.0
    for choices in itertools.product([False, True], repeat=size):
        episodes = [
            episode(str(i), [1.0] * (1 + goes), calls=conversation(1 + goes))
            for i, goes in enumerate(choices)
        ]
        group = make_group(episodes)
        advantages = credit.advantages(group, rule) if credit.level != "episode" else []
        for goes, of_calls in zip(choices, advantages, strict=True):
            total += of_calls[0] * (0.5 if goes else -0.5) / 2**size
    return total / size


def test_the_baseline_of_a_turn_puts_no_price_on_another_turn() -> None:
    """The true gradient of the expected reward 1 + p is p (1 - p) = 1/4. Compared with the others alone, the
    estimate is exact; the mean that includes the episode itself shrinks it by (G - 1) / G and no more."""
    size = 3
    exact = expected_gradient(Credit(), LEAVE_ONE_OUT, size)
    assert exact == pytest.approx(0.25)
    assert expected_gradient(Credit(), AdvantageRule(), size) == pytest.approx(0.25 * (size - 1) / size)
