"""The replay buffer: no token trains more often than declared, also over restarts; what is old leaves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.config import TrainingConfig
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.train.replay import ReplayBuffer


def config(**replay: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"groups_per_step": 2, "max_policy_lag": 9, "replay": replay})


def group(name: str) -> RolloutGroup:
    return make_group(
        [make_episode([make_call(None, [1], [2])], reward, f"{name}.{reward}") for reward in (0, 1)]
    )


def always(group: RolloutGroup) -> bool:
    return True


def names(groups: list[RolloutGroup]) -> list[str]:
    return [each.episodes[0].episode_uuid for each in groups]


Recorded = tuple[int, float, list[RolloutGroup]]
"""Step, time, and the groups that trained: what the journal keeps of a step."""


def one_step(
    buffer: ReplayBuffer, step: int, now: float, fresh: list[RolloutGroup], max_lag: int
) -> Recorded:
    buffer.drop(now=now, is_fresh=lambda group: step - born(group) <= max_lag)
    trained = [*fresh, *buffer.draw(step)]
    buffer.record(trained, at=now)
    return step, now, trained


def born(group: RolloutGroup) -> int:
    return int(group.episodes[0].episode_uuid.split("/")[0])


def restored(made: TrainingConfig, recorded: list[Recorded], max_lag: int) -> ReplayBuffer:
    """As a resumed run makes it, from the steps in its journal."""
    buffer = ReplayBuffer(made, seed=3)
    for step, now, trained in recorded:
        buffer.drop(now=now, is_fresh=lambda group, step=step: step - born(group) <= max_lag)
        buffer.record(trained, at=now)
    return buffer


@settings(max_examples=150, deadline=None)
@given(
    uses=st.integers(1, 4),
    capacity=st.integers(1, 6),
    number=st.integers(1, 4),
    recency=st.sampled_from([0.0, 1.0, 3.0]),
    max_lag=st.integers(0, 5),
    fresh=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    pauses=st.data(),
)
def test_no_token_trains_more_often_than_declared_over_any_restarts(
    uses: int, capacity: int, number: int, recency: float, max_lag: int, fresh: list[int], pauses: Any
) -> None:
    made = config(uses=uses, capacity=capacity, groups=number, recency=recency, max_age_s=10.0)
    whole = ReplayBuffer(made, seed=3)
    recorded: list[Recorded] = []
    now = 1000.0
    for step, size in enumerate(fresh, start=1):
        now += pauses.draw(st.sampled_from([1.0, 4.0, 11.0]))
        new = [group(f"{step}/{i}") for i in range(size)]
        again = restored(made, recorded, max_lag)
        event = one_step(whole, step, now, new, max_lag)
        # A run that was cut here and resumed trains on the same.
        assert names(one_step(again, step, now, new, max_lag)[2]) == names(event[2])
        recorded.append(event)
        drawn = event[2][size:]
        assert len(drawn) <= number
        assert len(set(names(event[2]))) == len(event[2]), "a group is in a step once"
        assert whole.metrics(drawn)["replay/kept"] <= capacity
        for each in drawn:
            first = next(at for at, _, groups in recorded if each in groups)
            assert first < step
            assert step - born(each) <= max_lag
            assert now - next(when for at, when, _ in recorded if at == first) <= 10.0
    used = Counter(name for _, _, groups in recorded for name in names(groups))
    assert max(used.values(), default=0) <= uses


def test_newer_groups_are_preferred_by_their_weight() -> None:
    """With weights 1, 8, 27 and one draw a step, the shares are those of the weights."""
    shares: Counter[str] = Counter()
    for seed in range(2000):
        buffer = ReplayBuffer(config(uses=9, groups=1, recency=3.0), seed=seed)
        buffer.record([group("a"), group("b"), group("c")], at=0.0)
        shares.update(names(buffer.draw(1)))
    assert shares["a.0"] / 2000 == pytest.approx(1 / 36, abs=0.02)
    assert shares["b.0"] / 2000 == pytest.approx(8 / 36, abs=0.03)
    assert shares["c.0"] / 2000 == pytest.approx(27 / 36, abs=0.03)


def test_what_is_too_old_leaves_and_is_counted() -> None:
    buffer = ReplayBuffer(config(uses=3, max_age_s=5.0, groups=9), seed=1)
    buffer.record([group("a")], at=0.0)
    buffer.record([group("b"), group("c")], at=4.0)
    buffer.drop(now=6.0, is_fresh=lambda group: not group.episodes[0].episode_uuid.startswith("b"))
    assert names(buffer.draw(2)) == ["c.0"]
    assert buffer.metrics(buffer.draw(2)) == {
        "replay/groups": 1,
        "replay/kept": 1,
        "replay/stale": 1,
        "replay/expired": 1,
    }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"asynchronous": True, "max_policy_lag": 0}, "max_policy_lag must be 1 or more"),
        ({"replay": {"uses": 3}}, "needs a max_policy_lag of 2 or more, not 1"),
        ({"replay": {"uses": 0}}, "greater than or equal to 1"),
        ({"replay": {"use": 2}}, "Extra inputs"),
    ],
)
def test_settings_that_would_only_make_stale_episodes_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainingConfig.model_validate(wrong)
    assert TrainingConfig.model_validate({"replay": {"uses": 2}}).replay.uses == 2
