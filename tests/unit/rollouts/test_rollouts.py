"""Merging calls into training sequences, and advantages."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.alignment import find_errors
from tinkerscript.rollouts.call import Call, full_prompts, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import EpisodeRollouts

NAMES = count()


def call(parent: Call | None, new_prompt: list[int], sampled: list[int], **extra: object) -> Call:
    logprobs = [-0.1 * (i + 1) for i in range(len(sampled))]
    return Call(
        call_id=f"c{next(NAMES)}",
        parent_id=parent.call_id if parent else None,
        new_prompt=pack_ids(new_prompt),
        sampled=pack_ids(sampled),
        logprobs=pack_logprobs(logprobs),
        stop_reason="stop",
        policy_version=0,
        **extra,  # type: ignore[arg-type]
    )


def test_a_multi_turn_episode_is_one_sequence_that_equals_its_calls() -> None:
    first = call(None, [1, 2, 3], [10, 11])
    second = call(first, [4, 5], [12])
    third = call(second, [6], [13, 14])
    (rollout,) = merge_calls([first, second, third], episode_uuid="e")
    assert rollout.tokens.tolist() == [1, 2, 3, 10, 11, 4, 5, 12, 6, 13, 14]
    assert rollout.sampled.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True, False, True, True]
    np.testing.assert_allclose(rollout.logprobs[rollout.sampled], [-0.1, -0.2, -0.1, -0.1, -0.2])
    assert [(s.call, s.start, s.end) for s in rollout.segments] == [
        (first, 3, 5),
        (second, 7, 8),
        (third, 9, 11),
    ]
    assert find_errors(rollout, vocabulary=100) == []


def test_an_edited_history_forks() -> None:
    first = call(None, [1, 2], [10])
    edited = call(None, [1, 2, 11, 3], [12], fork_reason="history_edited")
    rollouts = merge_calls([first, edited], episode_uuid="e")
    assert [r.tokens.tolist() for r in rollouts] == [[1, 2, 10], [1, 2, 11, 3, 12]]


def test_equal_siblings_are_two_sequences() -> None:
    siblings = [call(None, [1, 2], [10]), call(None, [1, 2], [10])]
    assert [r.tokens.tolist() for r in merge_calls(siblings, episode_uuid="e")] == [[1, 2, 10], [1, 2, 10]]


def test_a_call_extends_the_longest_sequence_that_its_prompt_starts_with() -> None:
    short = call(None, [1], [2])
    long = call(None, [1], [2, 3])
    child = call(long, [4], [5])
    rollouts = merge_calls([short, long, child], episode_uuid="e")
    assert [r.tokens.tolist() for r in rollouts] == [[1, 2], [1, 2, 3, 4, 5]]


@st.composite
def conversations(draw: st.DrawFn) -> list[Call]:
    """Random trees of calls over few ids, so that prefixes collide often."""
    ids = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *calls]))
        calls.append(call(parent, draw(ids), draw(st.lists(st.integers(0, 2), max_size=4))))
    return calls


@given(conversations())
def test_every_sampled_token_trains_once_under_its_own_prefix(calls: list[Call]) -> None:
    prompts = full_prompts(calls)
    rollouts = merge_calls(calls, episode_uuid="e")
    segments = [(rollout, segment) for rollout in rollouts for segment in rollout.segments]
    assert sorted(s.call.call_id for _, s in segments) == sorted(c.call_id for c in calls if c.sampled)
    for rollout, segment in segments:
        assert rollout.tokens[: segment.start].tobytes() == prompts[segment.call.call_id]
        assert rollout.tokens[segment.start : segment.end].tobytes() == segment.call.sampled
    assert sum(int(r.sampled.sum()) for r in rollouts) == sum(len(c.sampled_ids) for c in calls)


def test_a_missing_parent_is_an_error() -> None:
    parent = call(None, [1], [2])
    with pytest.raises(ValueError, match=f"its parent {parent.call_id} is not among"):
        merge_calls([call(parent, [3], [4])], episode_uuid="e")


def test_a_call_with_other_many_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="2 sampled ids, 1 logprobs"):
        Call(
            call_id="c",
            parent_id=None,
            new_prompt=b"",
            sampled=pack_ids([1, 2]),
            logprobs=pack_logprobs([-0.5]),
            stop_reason="stop",
            policy_version=0,
        )


def episode(reward: float) -> EpisodeRollouts:
    return EpisodeRollouts("e", reward, merge_calls([call(None, [1], [2, 3])], episode_uuid="e"))


def test_advantages_are_reward_minus_the_groups_mean() -> None:
    group = RolloutGroup("g", tuple(episode(r) for r in (1.0, 0.0, 0.0, 1.0, 1.0)))
    np.testing.assert_allclose(group.advantages(), [0.4, -0.6, -0.6, 0.4, 0.4], atol=1e-7)
    assert group.rewards_differ
    assert not RolloutGroup("g", (episode(1.0), episode(1.0))).rewards_differ
