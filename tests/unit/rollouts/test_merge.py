"""Merging: forks know their parents, prompts cost nothing twice, memory is linear."""

from __future__ import annotations

import tracemalloc
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tinkerscript.rollouts.call import Call, Prompts, full_prompts, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls

NAMES = count()


def call(parent: Call | None, new_prompt: list[int], sampled: list[int]) -> Call:
    return Call(
        call_id=f"m{next(NAMES)}",
        parent_id=parent.call_id if parent else None,
        new_prompt=pack_ids(new_prompt),
        sampled=pack_ids(sampled),
        logprobs=pack_logprobs([-0.5] * len(sampled)),
        stop_reason="stop",
        policy_version=0,
    )


def test_a_fork_knows_its_parent_and_what_it_shares() -> None:
    first = call(None, [1, 2, 3], [10, 11])
    main = call(first, [4], [12])
    edited = call(None, [1, 2, 3, 10, 9, 9], [13])
    other = call(None, [7], [14])
    deeper = call(None, [1, 2, 3, 10, 9, 9, 5], [15])
    rollouts = merge_calls([first, main, edited, other, deeper], episode_uuid="e")
    assert [(r.parent, r.fork) for r in rollouts] == [(None, 0), (0, 4), (None, 0), (1, 6)]
    for rollout in rollouts:
        if rollout.parent is not None:
            shared = rollouts[rollout.parent].tokens[: rollout.fork]
            np.testing.assert_array_equal(rollout.tokens[: rollout.fork], shared)


def test_a_second_child_of_one_call_forks_where_its_parent_ends() -> None:
    first = call(None, [1, 2], [10])
    left, right = call(first, [3], [11]), call(first, [3], [12])
    rollouts = merge_calls([first, left, right], episode_uuid="e")
    assert [r.tokens.tolist() for r in rollouts] == [[1, 2, 10, 3, 11], [1, 2, 10, 3, 12]]
    assert (rollouts[1].parent, rollouts[1].fork) == (0, 4)
    assert [r.sampled.tolist() for r in rollouts] == [[False, False, True, False, True], [False] * 4 + [True]]


def test_a_sequence_may_share_all_of_its_prompt_with_another() -> None:
    rollouts = merge_calls([call(None, [1, 2], [10]), call(None, [1], [11])], episode_uuid="e")
    assert [(r.parent, r.fork) for r in rollouts] == [(None, 0), (0, 1)]


def test_sequences_that_end_alike_are_told_apart_by_their_beginnings() -> None:
    same = [*range(20, 40)]
    one, other = call(None, [1, *same], [10]), call(None, [2, *same], [10])
    rollouts = merge_calls([one, other, call(other, [3], [11]), call(one, [3], [12])], episode_uuid="e")
    assert [r.tokens.tolist() for r in rollouts] == [[1, *same, 10, 3, 12], [2, *same, 10, 3, 11]]


@pytest.mark.parametrize("trains", [False, True])
def test_constrained_tokens_carry_loss_only_on_request(trains: bool) -> None:
    first = call(None, [1], [10, 11])
    second = structs.replace(call(first, [2], [12, 13, 14]), constrained=bytes([0, 1, 0]))
    (rollout,) = merge_calls([first, second], episode_uuid="e", trains_constrained=trains)
    assert rollout.tokens[rollout.sampled].tolist() == [10, 11, 12, 13, 14]
    assert rollout.tokens[rollout.loss_mask].tolist() == [10, 11, 12, *([13] if trains else []), 14]


def test_calls_that_sampled_nothing_pass_their_prompt_on() -> None:
    first = call(None, [1], [10])
    empty = call(first, [2], [])
    again = call(empty, [3], [])
    last = call(again, [4], [11])
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
        made = call(parent, draw(ids), draw(st.lists(st.integers(0, 1), max_size=3)))
        if parent is not None and draw(st.booleans()):
            whole = Prompts([*calls, made])[made.call_id]
            made = call(None, np.frombuffer(whole, "<i4").tolist(), made.sampled_ids.tolist())
        calls.append(made)
    return calls


@given(recorded())
def test_forks_are_exact_and_every_token_is_sampled_once(calls: list[Call]) -> None:
    prompts = full_prompts(calls)
    rollouts = merge_calls(calls, episode_uuid="e")
    seen: list[str] = []
    for number, rollout in enumerate(rollouts):
        assert rollout.episode_uuid == "e"
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


def conversation(turns: int, tokens: int) -> list[Call]:
    calls: list[Call] = []
    random = np.random.default_rng(0)
    half = tokens // turns // 2
    for _ in range(turns):
        ids = random.integers(0, 1000, 2 * half)
        calls.append(call(calls[-1] if calls else None, ids[:half].tolist(), ids[half:].tolist()))
    return calls


def test_memory_grows_with_the_tokens_and_not_with_the_turns() -> None:
    """200 turns of 40k tokens in all would be 16 MB as prompts; the sequence is 0.16 MB."""
    peaks: dict[int, int] = {}
    for turns in (20, 200):
        calls = conversation(turns, 40_000)
        tracemalloc.start()
        merge_calls(calls, episode_uuid="e")
        peaks[turns] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[200] < 1.5 * peaks[20]
    assert peaks[200] < 6 * 4 * 40_000


def test_two_calls_of_one_id_are_refused() -> None:
    first = call(None, [1], [2])
    with pytest.raises(ValueError, match="two calls have the id"):
        full_prompts([first, first])
