"""What a step or an evaluation waits for: groups of outcomes by id."""

from __future__ import annotations

import pytest

from rollout_helpers import make_accepted
from tinkerscript.errors import NoSuccessError
from tinkerscript.train.collector import HOPELESS_AFTER, Batch
from tinkerscript.train.episode_source import PlannedEpisode
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome


def accepted(uuid: str, reward: float = 1.0, *, group: str = "") -> EpisodeAccepted:
    return make_accepted(uuid, reward, group_id=group, pool="w" if group else "")


def failed(uuid: str) -> EpisodeFailed:
    return EpisodeFailed(episode_uuid=uuid, failures=[])


def planned(batch: Batch, groups: int, size: int = 3) -> None:
    for group in range(groups):
        for number in range(size):
            episode = PlannedEpisode("train", f"g{group}", {"n": group}, episode_uuid=f"g{group}/{number}")
            batch.plan(episode)


def end(batch: Batch, outcome: Outcome) -> bool:
    return batch.groups[outcome.episode_uuid.split("/")[0]].add(outcome)


def end_group(batch: Batch, group: int, *rewards: float | None) -> None:
    for number, reward in enumerate(rewards):
        name = f"g{group}/{number}"
        assert end(batch, failed(name) if reward is None else accepted(name, reward))


def test_a_batch_is_over_with_its_last_episode() -> None:
    batch = Batch("evaluation before")
    planned(batch, 2)
    end_group(batch, 0, 1, 0, None)
    assert not batch.is_over
    end_group(batch, 1, 1, None)
    assert batch.leftovers == ["g1/2"]
    assert end(batch, failed("g1/2"))
    assert (batch.is_over, batch.ended, batch.leftovers) == (True, 6, [])
    # One accepted episode cannot be compared with anything.
    assert [group.group_id for group in batch.trainable(2)] == ["g0"]


def test_an_outcome_counts_once_and_a_strangers_never() -> None:
    batch = Batch("step 1")
    planned(batch, 1, size=2)
    group = batch.groups["g0"]
    assert group.add(accepted("g0/0"))
    assert not group.add(accepted("g0/0"))
    assert not group.add(failed("g0/0"))
    assert not group.add(accepted("nobody's"))
    assert not batch.is_over
    assert batch.outcomes.keys() == {"g0/0"}


def test_groups_with_equal_rewards_do_not_count_where_they_are_replaced() -> None:
    for rule, counted in (("groups", ["g0", "g1"]), ("differing_groups", ["g1"])):
        batch = Batch("step 1", rule=rule, needed=2)  # type: ignore[arg-type]
        planned(batch, 3)
        end_group(batch, 0, 1, 1, 1)
        end_group(batch, 1, 0, 1, None)
        end_group(batch, 2, 0, 1)
        assert [group.group_id for group in batch.counted] == counted
        assert batch.is_met == (len(counted) == 2)
        told = batch.progress({})
        assert (told.rule, told.have, told.needed) == (rule, len(counted), 2)
        assert (told.episodes_ended, told.episodes_expected) == (8, 9)


def test_groups_leave_for_a_batch_of_their_own_and_the_others_stay() -> None:
    pool = Batch("step 1")
    planned(pool, 3, size=1)
    end_group(pool, 1, 1)
    taken = pool.take([pool.groups["g1"]])
    assert (taken.label, taken.groups.keys(), taken.payloads) == ("step 1", {"g1"}, {"g1/0": {"n": 1}})
    assert (pool.groups.keys(), pool.outcomes, pool.ended) == ({"g0", "g2"}, {}, 0)


def test_clients_fill_a_batch_group_by_group() -> None:
    batch = Batch("step 1", needed=2)
    assert not batch.is_met
    batch.adopt([accepted(f"a{number}", group="w/a") for number in range(3)])
    assert not batch.is_met
    batch.adopt([accepted(f"b{number}", group="w/b") for number in range(2)])
    assert batch.is_met
    assert [len(group.accepted) for group in batch.trainable(2)] == [3, 2]
    batch.adopt([accepted(f"again{number}", group="w/a") for number in range(2)])
    assert len(batch.outcomes) == 7, "a name that a client uses again"
    assert batch.payloads == {}


def failures(batch: Batch, number: int, kind: str = "task_error") -> None:
    for index in range(number):
        failure: dict[str, object] = {"kind": kind, "message": f"sample {index}: boom", "client_uuid": "w-0"}
        assert end(batch, EpisodeFailed(episode_uuid=f"g{index}/0", failures=[failure], group_id=f"g{index}"))


def test_a_batch_in_which_everything_failed_says_why() -> None:
    batch = Batch("step 1")
    planned(batch, 3, size=1)
    failures(batch, 2)
    batch.check_success()
    assert end(batch, EpisodeFailed(episode_uuid="g2/0", failures=[{"kind": "lease_expired"}]))
    with pytest.raises(NoSuccessError) as error:
        batch.check_success()
    first, second, third = str(error.value).splitlines()
    assert first == "step 1: all 3 episodes that ended failed:"
    assert second == "  2 x task_error: sample 0: boom (g0, w-0)"
    assert third.startswith("  1 x lease_expired")


@pytest.mark.parametrize("own", ["", "worker-1-"])
def test_a_hopeless_batch_is_not_waited_for(own: str) -> None:
    """What fails at other clients ends no run whose own workers have not begun."""
    batch = Batch("evaluation before")
    planned(batch, 500, size=1)
    failures(batch, HOPELESS_AFTER if own else HOPELESS_AFTER - 1)
    batch.check_success(own_clients=own)
    last: list[dict[str, object]] = [{"client_uuid": "worker-1-0"}, {"client_uuid": "w-0"}] if own else []
    number = len(batch.outcomes)
    end(batch, EpisodeFailed(episode_uuid=f"g{number}/0", failures=last))
    with pytest.raises(NoSuccessError, match=f"all {number + 1} episodes"):
        batch.check_success(own_clients=own)


@pytest.mark.parametrize("last", [accepted("g40/0"), None])
def test_one_success_or_a_cancelled_batch_is_no_failure(last: Outcome | None) -> None:
    batch = Batch("step 1")
    planned(batch, 41, size=1)
    if last is not None:
        end(batch, last)
    failures(batch, 40, kind="task_error" if last else "cancelled")
    batch.check_success()
