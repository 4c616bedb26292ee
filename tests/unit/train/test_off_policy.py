"""How old what trains may be: the lag of episodes, and the replay buffer, also over restarts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_helpers import make_accepted, make_call, make_episode, make_group
from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import FOREIGN_POLICY, Call
from tinkerscript.train.off_policy import PolicyLags, ReplayBuffer
from tinkerscript.trainer_link.messages import EpisodeAccepted


def accepted(uuid: str, *calls: Call) -> EpisodeAccepted:
    return make_accepted(uuid, 1.0, calls)


def sampled(version: int, end: int | None = None, **more: Any) -> Call:
    return make_call(None, [1], [2], policy_version=version, policy_version_end=end, **more)


@pytest.mark.parametrize(("sampled_by", "lag"), [([3], 0), ([0, 3], 3), ([3, 1, 2], 2), ([], 0)])
def test_the_oldest_weights_of_an_episode_are_its_lag(sampled_by: list[int], lag: int) -> None:
    """Of any role that trains. Without a call, nothing sampled it. Version n has n steps behind it."""
    lags = PolicyLags(TrainingConfig(), {version: version for version in range(4)}, max_lag=2)
    plain = accepted("plain", *(sampled(version) for version in sampled_by))
    changed = accepted("changed", *(sampled(version, 3, role="rival") for version in sampled_by))
    judge = sampled(FOREIGN_POLICY, role="judge")
    judged = accepted("judged", *(sampled(version) for version in sampled_by), judge)
    found = lags.fresh([("g", [plain, changed, judged])], step=3)
    assert found.lags == {lag: 3}
    assert found.all_stale == (lag > 2)
    assert set(found.stale) == ({"plain", "changed", "judged"} if lag > 2 else set())
    assert [group_id for group_id, _ in found.groups] == ([] if lag > 2 else ["g"])


def test_an_episode_that_unknown_weights_finished_is_stale() -> None:
    """Its calls began under a known version and ended under one that the trainer never published."""
    lags = PolicyLags(TrainingConfig(), {0: 0}, max_lag=2)
    group = [accepted("a", sampled(0)), accepted("b", sampled(0, 0)), accepted("c", sampled(0, -1))]
    found = lags.fresh([("g", group)], step=0)
    assert found.lags == {0: 2, None: 1}
    assert found.stale == {"c": "stale: sampled by weights that this run does not build on"}
    ((_, kept),) = found.groups
    assert [outcome.episode_uuid for outcome in kept] == ["a", "b"]


def test_a_group_with_too_few_fresh_episodes_does_not_train() -> None:
    lags = PolicyLags(TrainingConfig(), {0: 0, 1: 1, 2: 2}, max_lag=1)
    found = lags.fresh([("g", [accepted("a", sampled(2)), accepted("b", sampled(0))])], step=2)
    assert (found.groups, found.all_stale, found.stale) == ([], False, {"b": "stale: 2 steps old"})
    assert lags.usable(2) == [1, 2]
    lags.published(3, step=3)
    assert (lags.usable(3), lags.by_version(3)[0]) == ([2, 3], 3)


def test_what_is_too_old_may_stay_in_its_group_to_be_compared_with() -> None:
    lags = PolicyLags(TrainingConfig(), {0: 0, 1: 1, 2: 2}, max_lag=1, keeps_stale=True)
    mixed = [accepted("a", sampled(2)), accepted("b", sampled(0))]
    found = lags.fresh(
        [("mixed", mixed), ("old", [accepted("c", sampled(0)), accepted("d", sampled(0))])], step=2
    )
    assert found.groups == [("mixed", mixed)]
    assert found.stale == dict.fromkeys("bcd", "stale: 2 steps old")
    assert lags.usable(2) is None, "every result counts"


@pytest.mark.parametrize(("max_lag", "uses", "oldest"), [(0, 1, 0), (0, 3, 2), (3, 2, 3)])
def test_replayed_groups_may_be_as_old_as_their_uses_need(max_lag: int, uses: int, oldest: int) -> None:
    lags = PolicyLags(TrainingConfig(replay_uses=uses), {n: n for n in range(5)}, max_lag=max_lag)
    made = [make_group([make_episode([sampled(version)])]) for version in range(5)]
    assert [4 - n for n, each in enumerate(made) if lags.may_train(each, step=4)] == [*range(oldest, -1, -1)]


# Replay


def config(uses: int, groups_per_step: int) -> TrainingConfig:
    return TrainingConfig(groups_per_step=groups_per_step, replay_uses=uses)


def group(name: str) -> RolloutGroup:
    return make_group(
        [make_episode([make_call(None, [1], [2])], reward, f"{name}.{reward}") for reward in (0, 1)]
    )


def names(groups: list[RolloutGroup]) -> list[str]:
    return [each.episodes[0].episode_uuid for each in groups]


Recorded = tuple[int, list[RolloutGroup]]
"""A step, and the groups that trained: what the ledger keeps of it."""


def one_step(buffer: ReplayBuffer, step: int, fresh: list[RolloutGroup], max_lag: int) -> Recorded:
    buffer.drop(lambda group: step - born(group) <= max_lag)
    trained = [*fresh, *buffer.draw(step)]
    buffer.record(trained)
    return step, trained


def born(group: RolloutGroup) -> int:
    return int(group.episodes[0].episode_uuid.split("/")[0])


def restored(made: TrainingConfig, recorded: list[Recorded], max_lag: int, capacity: int) -> ReplayBuffer:
    """As a resumed run makes it, from the steps in its ledger."""
    buffer = ReplayBuffer(made, seed=3, capacity=capacity)
    for step, trained in recorded:
        buffer.drop(lambda group, step=step: step - born(group) <= max_lag)
        buffer.record(trained)
    return buffer


@settings(max_examples=100, deadline=None)
@given(
    uses=st.integers(1, 4),
    capacity=st.integers(1, 6),
    groups=st.integers(1, 3),
    max_lag=st.integers(0, 5),
    fresh=st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_no_token_trains_more_often_than_declared_over_any_restarts(
    uses: int, capacity: int, groups: int, max_lag: int, fresh: list[int]
) -> None:
    made, number = config(uses, groups), (uses - 1) * groups
    whole = ReplayBuffer(made, seed=3, capacity=capacity)
    recorded: list[Recorded] = []
    for step, size in enumerate(fresh, start=1):
        new = [group(f"{step}/{i}") for i in range(size)]
        again = restored(made, recorded, max_lag, capacity)
        event = one_step(whole, step, new, max_lag)
        # A run that was cut here and resumed trains on the same.
        assert names(one_step(again, step, new, max_lag)[1]) == names(event[1])
        recorded.append(event)
        drawn = event[1][size:]
        assert len(drawn) <= number
        assert len(set(names(event[1]))) == len(event[1]), "a group is in a step once"
        assert whole.metrics(drawn)["replay/kept"] <= capacity
        for each in drawn:
            assert next(at for at, groups in recorded if each in groups) < step
            assert step - born(each) <= max_lag
    used = Counter(name for _, groups in recorded for name in names(groups))
    assert max(used.values(), default=0) <= uses


def test_newer_groups_are_preferred_by_their_weight() -> None:
    """With weights 1, 8, 27 and one draw a step, the shares are those of the weights."""
    shares: Counter[str] = Counter()
    for seed in range(2000):
        buffer = ReplayBuffer(config(2, 1), seed=seed)
        buffer.record([group("a"), group("b"), group("c")])
        shares.update(names(buffer.draw(1)))
    assert shares["a.0"] / 2000 == pytest.approx(1 / 36, abs=0.02)
    assert shares["b.0"] / 2000 == pytest.approx(8 / 36, abs=0.03)
    assert shares["c.0"] / 2000 == pytest.approx(27 / 36, abs=0.03)


def test_what_is_too_old_leaves_and_is_counted() -> None:
    buffer = ReplayBuffer(config(3, 5), seed=1)
    buffer.record([group("b"), group("c")])
    buffer.drop(lambda group: not group.episodes[0].episode_uuid.startswith("b"))
    assert names(buffer.draw(2)) == ["c.0"]
    assert buffer.metrics(buffer.draw(2)) == {"replay/groups": 1, "replay/kept": 1, "replay/stale": 1}


@pytest.mark.parametrize(
    ("given", "lag", "replay_lag"),
    [
        ({}, 1, 2),
        ({"task": {"name": "t"}}, 0, 1),
        ({"task": {"name": "t"}, "training": {"replay_uses": 3}}, 0, 3),
    ],
)
def test_a_lag_that_is_left_open_goes_by_whose_samples_train(
    given: dict[str, Any], lag: int, replay_lag: int
) -> None:
    made = RunConfig.model_validate(given)
    assert (made.max_policy_lag, made.replay_lag) == (lag, replay_lag)
    told = RunConfig.model_validate(given | {"training": {"max_policy_lag": 4}})
    assert (told.max_policy_lag, told.replay_lag) == (4, 5)
