"""When a step has enough: groups are barriers of outcomes by id."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_helpers import make_accepted
from tinkerscript.errors import NoSuccessError
from tinkerscript.train.collector import HOPELESS_AFTER, Batch
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome


def accepted(uuid: str, reward: float = 1.0, *, group: str = "", size: int = 0) -> EpisodeAccepted:
    return make_accepted(uuid, reward, group_id=group, group_size=size, pool="w" if group else "")


def failed(uuid: str) -> EpisodeFailed:
    return EpisodeFailed(episode_uuid=uuid, failures=[])


def planned(batch: Batch, groups: int, size: int = 3) -> None:
    for group in range(groups):
        batch.plan(f"g{group}", [f"g{group}/{number}" for number in range(size)])


def end_group(batch: Batch, group: int, *rewards: float | None) -> None:
    for number, reward in enumerate(rewards):
        name = f"g{group}/{number}"
        assert batch.add(failed(name) if reward is None else accepted(name, reward))


def test_a_step_without_extra_groups_waits_for_every_episode() -> None:
    batch = Batch("step 1", rule="groups", groups=2, group_size=3)
    planned(batch, 2)
    end_group(batch, 0, 1, 0, None)
    assert not batch.is_met
    end_group(batch, 1, 1, None)
    assert batch.leftovers == ["g1/2"]
    assert batch.add(failed("g1/2"))
    assert batch.is_met
    # One accepted episode cannot be compared with anything.
    assert [group.group_id for group in batch.trainable(2)] == ["g0"]


def test_an_outcome_counts_once_and_a_strangers_never() -> None:
    batch = Batch("step 1", rule="groups", groups=1, group_size=2)
    planned(batch, 1, size=2)
    assert batch.add(accepted("g0/0"))
    assert not batch.add(accepted("g0/0"))
    assert not batch.add(failed("g0/0"))
    assert not batch.add(accepted("nobody's"))
    assert not batch.is_met
    assert batch.outcomes.keys() == {"g0/0"}


def test_extra_groups_let_stragglers_go() -> None:
    batch = Batch("step 1", rule="groups", groups=2, group_size=3)
    planned(batch, 3)
    end_group(batch, 0, 1, 0, 1)
    end_group(batch, 1, 1)
    end_group(batch, 2, 0, 0, 1)
    assert batch.is_met
    assert batch.leftovers == ["g1/1", "g1/2"]
    assert [group.group_id for group in batch.trainable(2)] == ["g0", "g2"]


def test_uniform_groups_are_replaced_up_to_the_limit() -> None:
    batch = Batch("step 1", rule="differing_groups", groups=2, group_size=3, max_groups=3)
    planned(batch, 2)
    end_group(batch, 0, 1, 1, 1)
    assert batch.replacements_needed == 1
    batch.plan("g2", ["g2/0", "g2/1", "g2/2"])
    assert batch.replacements_needed == 0
    end_group(batch, 1, 0, 1, None)
    assert not batch.is_met
    end_group(batch, 2, 0, 0, 0)
    # One differs, three are registered, more are not allowed: it trains on what it has.
    assert batch.replacements_needed == 0
    assert batch.is_met


def test_clients_fill_a_batch_group_by_group() -> None:
    batch = Batch("step 1", rule="groups", groups=2, group_size=2, from_clients=True)
    assert not batch.is_met
    batch.adopt(accepted("a0", 1, group="w/a", size=3))
    batch.adopt(accepted("a1", 0, group="w/a", size=3))
    batch.adopt(accepted("b0", 0, group="w/b"))
    assert not batch.is_met
    batch.adopt(accepted("a2", 0, group="w/a", size=3))
    assert not batch.is_met
    batch.adopt(accepted("b1", 1, group="w/b"))
    assert batch.is_met
    assert [len(group.accepted) for group in batch.trainable(2)] == [3, 2]


Ending = Literal["high", "low", "failed"]


@given(
    rule=st.sampled_from(["groups", "differing_groups"]),
    needed=st.integers(1, 4),
    extra=st.integers(0, 3),
    size=st.integers(2, 4),
    data=st.data(),
)
def test_every_batch_comes_to_its_end(
    rule: Literal["groups", "differing_groups"], needed: int, extra: int, size: int, data: st.DataObject
) -> None:
    """Whatever the order and the endings: met as soon as a naive reading of the rule says, never stuck."""
    most = 3 * needed + extra
    batch = Batch("step", rule=rule, groups=needed, group_size=size, max_groups=most)
    planned(batch, needed + extra, size)
    taken: dict[str, Outcome] = {}
    while not batch.is_met:
        for _ in range(batch.replacements_needed):
            number = len(batch.groups)
            batch.plan(f"g{number}", [f"g{number}/{i}" for i in range(size)])
        uuid = data.draw(st.sampled_from(sorted(batch.leftovers)))
        ending: Ending = data.draw(st.sampled_from(["high", "low", "failed"]))
        taken[uuid] = failed(uuid) if ending == "failed" else accepted(uuid, float(ending == "high"))
        assert batch.add(taken[uuid])
        assert batch.is_met == naive_is_met(batch, rule, needed, size, most, taken)
    assert len(batch.groups) <= max(most, needed + extra)
    assert batch.outcomes == taken


def naive_is_met(
    batch: Batch, rule: str, needed: int, size: int, most: int, taken: dict[str, Outcome]
) -> bool:
    rewards = {
        name: [taken[u].reward for u in group.outcomes if isinstance(taken.get(u), EpisodeAccepted)]  # type: ignore[union-attr]
        for name, group in batch.groups.items()
    }
    complete = [name for name, group in batch.groups.items() if all(uuid in taken for uuid in group.outcomes)]
    differing = [name for name in complete if len(set(rewards[name])) > 1]
    enough = {"groups": len(complete) >= needed, "differing_groups": len(differing) >= needed}[rule]
    nothing_left = len(complete) == len(batch.groups)
    may_add = rule == "differing_groups" and len(batch.groups) < most
    return enough or (nothing_left and not may_add)


def failures(batch: Batch, number: int, kind: str = "task_error") -> None:
    for index in range(number):
        failure: dict[str, object] = {"kind": kind, "message": f"sample {index}: boom", "client_uuid": "w-0"}
        outcome = EpisodeFailed(episode_uuid=f"g{index}/0", failures=[failure], group_id=f"g{index}")
        assert batch.add(outcome)


def test_a_batch_in_which_everything_failed_says_why() -> None:
    batch = Batch("step 1", rule="groups", groups=3, group_size=1)
    planned(batch, 3, size=1)
    failures(batch, 2)
    batch.check_success()
    assert batch.add(EpisodeFailed(episode_uuid="g2/0", failures=[{"kind": "lease_expired"}]))
    with pytest.raises(NoSuccessError) as error:
        batch.check_success()
    first, second, third = str(error.value).splitlines()
    assert first == "step 1: all 3 episodes that ended failed:"
    assert second == "  2 x task_error: sample 0: boom (g0, w-0)"
    assert third.startswith("  1 x lease_expired")


def test_a_hopeless_batch_is_not_waited_for() -> None:
    batch = Batch("evaluation before", rule="groups", groups=500, group_size=1)
    planned(batch, 500, size=1)
    failures(batch, HOPELESS_AFTER - 1)
    batch.check_success()
    batch.add(EpisodeFailed(episode_uuid="g31/0", failures=[]))
    with pytest.raises(NoSuccessError, match="all 32 episodes"):
        batch.check_success()


def test_what_fails_at_other_clients_ends_no_run_whose_own_workers_have_not_begun() -> None:
    batch = Batch("evaluation before", rule="groups", groups=HOPELESS_AFTER + 2, group_size=1)
    planned(batch, HOPELESS_AFTER + 2, size=1)
    failures(batch, HOPELESS_AFTER)
    batch.check_success(own_clients="worker-1-")
    failed: list[dict[str, object]] = [{"client_uuid": "worker-1-0"}, {"client_uuid": "w-0"}]
    batch.add(EpisodeFailed(episode_uuid=f"g{HOPELESS_AFTER}/0", failures=failed))
    with pytest.raises(NoSuccessError, match="all 33 episodes"):
        batch.check_success(own_clients="worker-1-")


@pytest.mark.parametrize("last", [accepted("g40/0"), None])
def test_one_success_or_a_cancelled_batch_is_no_failure(last: Outcome | None) -> None:
    batch = Batch("step 1", rule="groups", groups=41, group_size=1)
    planned(batch, 41, size=1)
    if last is not None:
        batch.add(last)
    failures(batch, 40, kind="task_error" if last else "cancelled")
    batch.check_success()
