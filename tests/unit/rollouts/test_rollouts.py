"""Merging calls: each sampled token once, under its own prefix; forks know their parents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollout_helpers import make_call
from tinkerscript.rollouts.alignment import find_errors
from tinkerscript.rollouts.call import Call, Prompts, full_prompts
from tinkerscript.rollouts.merge import merge_calls


def test_a_multi_turn_episode_is_one_sequence_that_equals_its_calls() -> None:
    first = make_call(None, [1, 2, 3], [10, 11])
    second = make_call(first, [4, 5], [12])
    third = make_call(second, [6], [13, 14])
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


def test_a_call_extends_the_longest_sequence_that_its_prompt_starts_with() -> None:
    short = make_call(None, [1], [2])
    long = make_call(None, [1], [2, 3])
    child = make_call(long, [4], [5])
    rollouts = merge_calls([short, long, child], episode_uuid="e")
    assert [r.tokens.tolist() for r in rollouts] == [[1, 2], [1, 2, 3, 4, 5]]


def test_a_call_with_other_many_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="2 sampled ids, 1 logprobs"):
        make_call(None, [], [1, 2], logprobs=[-0.5])


def test_a_fork_knows_its_parent_and_what_it_shares() -> None:
    first = make_call(None, [1, 2, 3], [10, 11])
    main = make_call(first, [4], [12])
    edited = make_call(None, [1, 2, 3, 10, 9, 9], [13])
    other = make_call(None, [7], [14])
    deeper = make_call(None, [1, 2, 3, 10, 9, 9, 5], [15])
    rollouts = merge_calls([first, main, edited, other, deeper], episode_uuid="e")
    assert [(r.parent, r.fork) for r in rollouts] == [(None, 0), (0, 4), (None, 0), (1, 6)]
    for rollout in rollouts:
        if rollout.parent is not None:
            shared = rollouts[rollout.parent].tokens[: rollout.fork]
            np.testing.assert_array_equal(rollout.tokens[: rollout.fork], shared)


def test_sequences_that_end_alike_are_told_apart_by_their_beginnings() -> None:
    same = [*range(20, 40)]
    one, other = make_call(None, [1, *same], [10]), make_call(None, [2, *same], [10])
    rollouts = merge_calls(
        [one, other, make_call(other, [3], [11]), make_call(one, [3], [12])], episode_uuid="e"
    )
    assert [r.tokens.tolist() for r in rollouts] == [[1, *same, 10, 3, 12], [2, *same, 10, 3, 11]]


@pytest.mark.parametrize("trains", [False, True])
def test_constrained_tokens_carry_loss_only_on_request(trains: bool) -> None:
    first = make_call(None, [1], [10, 11])
    second = structs.replace(make_call(first, [2], [12, 13, 14]), constrained=bytes([0, 1, 0]))
    (rollout,) = merge_calls([first, second], episode_uuid="e", trains_constrained=trains)
    assert rollout.tokens[rollout.sampled].tolist() == [10, 11, 12, 13, 14]
    assert rollout.tokens[rollout.loss_mask].tolist() == [10, 11, 12, *([13] if trains else []), 14]


def test_calls_that_sampled_nothing_pass_their_prompt_on() -> None:
    first = make_call(None, [1], [10])
    empty = make_call(first, [2], [])
    again = make_call(empty, [3], [])
    last = make_call(again, [4], [11])
    (rollout,) = merge_calls([first, empty, again, last], episode_uuid="e")
    assert rollout.tokens.tolist() == [1, 10, 2, 3, 4, 11]
    with pytest.raises(ValueError, match="is not among the calls before it"):
        merge_calls([first, again, last], episode_uuid="e")


@st.composite
def recorded(draw: st.DrawFn) -> list[Call]:
    """Trees of calls over two ids; some name their parent, some carry the whole prompt instead."""
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from([None, *calls]))
        made = make_call(parent, draw(ids), draw(st.lists(st.integers(0, 1), max_size=3)))
        if parent is not None and draw(st.booleans()):
            whole = Prompts([*calls, made])[made.call_id]
            made = make_call(None, np.frombuffer(whole, "<i4").tolist(), made.sampled_ids.tolist())
        calls.append(made)
    return calls


@given(recorded())
def test_forks_are_exact_and_every_token_is_sampled_once(calls: list[Call]) -> None:
    prompts = full_prompts(calls)
    rollouts = merge_calls(calls, episode_uuid="e")
    seen: list[str] = []
    for number, rollout in enumerate(rollouts):
        assert rollout.episode_uuid == "e"
        assert find_errors(rollout, vocabulary=2, prompts=prompts) == []
        for segment in rollout.segments:
            seen.append(segment.call.call_id)
            assert rollout.tokens[: segment.start].tobytes() == prompts[segment.call.call_id]
            assert rollout.tokens[segment.start : segment.end].tobytes() == segment.call.sampled
        assert rollout.fork <= rollout.segments[0].start
        if rollout.parent is None:
            assert rollout.fork == 0
        else:
            assert rollout.parent < number
            parent = rollouts[rollout.parent].tokens
            np.testing.assert_array_equal(rollout.tokens[: rollout.fork], parent[: rollout.fork])
    assert sorted(seen) == sorted(c.call_id for c in calls if c.sampled)
    assert sum(int(r.sampled.sum()) for r in rollouts) == sum(len(c.sampled_ids) for c in calls)


def test_two_calls_of_one_id_are_refused() -> None:
    first = make_call(None, [1], [2])
    with pytest.raises(ValueError, match="two calls have the id"):
        full_prompts([first, first])


def experts_from(first: int, tokens: int) -> bytes:
    """Two bytes for each token, numbered from `first` on."""
    return b"".join(bytes([first + i, 100 + first + i]) for i in range(tokens))


def test_experts_stay_with_their_tokens_across_turns_and_forks() -> None:
    """Each call records its own tokens', a fork has its parents' before it, a call without any has none."""
    first = make_call(None, [1, 2, 3], [10, 11], experts=experts_from(0, 5))
    second = make_call(first, [4], [12, 13], experts=experts_from(5, 3))
    fork = make_call(first, [5, 6], [14], experts=experts_from(20, 3))
    late = make_call(fork, [7], [15])
    rollouts = merge_calls([first, second, fork, late], episode_uuid="e")
    assert [rollout.tokens.tolist() for rollout in rollouts] == [
        [1, 2, 3, 10, 11, 4, 12, 13],
        [1, 2, 3, 10, 11, 5, 6, 14, 7, 15],
    ]
    main, other = (np.asarray(rollout.experts) for rollout in rollouts)
    assert main[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert other[:, 0].tolist() == [0, 1, 2, 3, 4, 20, 21, 22, 255, 255]
    assert other[:, 1].tolist() == [100, 101, 102, 103, 104, 120, 121, 122, 255, 255]
    (plain,) = merge_calls([make_call(None, [1], [2])], episode_uuid="e")
    assert plain.experts is None


def test_experts_of_several_models_are_no_experts() -> None:
    first = make_call(None, [1, 2, 3], [10, 11], experts=experts_from(0, 5))
    second = make_call(first, [4], [12], experts=bytes(6))
    (rollout,) = merge_calls([first, second], episode_uuid="e")
    assert rollout.experts is not None
    assert rollout.experts.shape == (7, 0)


@pytest.mark.parametrize("size", [1, 9, 11, 5 * 4097])
def test_experts_that_are_not_of_each_token_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"same number of bytes for each of 5 ids, .* has {size} in all"):
        make_call(None, [1, 2, 3], [10, 11], experts=bytes(size))
    with pytest.raises(ValueError, match=r"for each of 0 ids"):
        make_call(None, [], [], experts=bytes(size))
