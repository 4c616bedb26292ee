"""What a journal says about where a run stands, and what of it may still be used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_helpers import make_accepted, make_call
from tinkerscript.rollouts.parquet import read_parquet
from tinkerscript.train.history import History, read_history, recorded_groups
from tinkerscript.train.journal import (
    AnyEvent,
    Checkpointed,
    Discarded,
    EpisodeRegistered,
    Evaluated,
    Journal,
    PolicyPublished,
    Resumed,
    SetAside,
    StepConsumed,
    read_journal,
)
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed


def registered(step: int, *uuids: str) -> list[AnyEvent]:
    return [
        EpisodeRegistered(
            episode_uuid=uuid,
            episode_type="train",
            group_id=f"step-{step}",
            step=step,
            position=10 * step + i,
        )
        for i, uuid in enumerate(uuids)
    ]


def ended(*uuids: str) -> list[AnyEvent]:
    return [make_accepted(uuid) for uuid in uuids]


def evaluated(label: str, step: int) -> Evaluated:
    return Evaluated(label=label, step=step, policy_version=step, score=0.5, accepted=4, failed=0)


def step_done(step: int, *uuids: str, version: int) -> list[AnyEvent]:
    done = (
        PolicyPublished(policy_version=version, step=step),
        StepConsumed(step=step, episode_uuids=list(uuids)),
    )
    return [*registered(step, *uuids), *ended(*uuids), *done]


START: list[AnyEvent] = [PolicyPublished(policy_version=0, step=0), evaluated("before", 0)]


def everything(step: int) -> bool:
    return True


def test_an_empty_journal_is_a_new_run() -> None:
    history = read_history([], exists=everything)
    assert (history.step, history.next_position, history.planned) == (0, 0, [])
    assert history == History()


def test_without_a_checkpoint_the_first_steps_results_are_used_again() -> None:
    events = [*START, *step_done(1, "a", "b", version=1), *registered(2, "c")]
    history = read_history(events, exists=everything)
    assert history.step == 0
    assert [plan.episode_uuid for plan in history.planned] == ["a", "b"]
    assert history.outcomes.keys() == {"a", "b"}
    assert history.versions == {0: 0}
    assert history.evaluations.keys() == {"before"}
    assert history.next_position == 12


def test_what_came_after_the_checkpoint_is_undone() -> None:
    events = [
        *START,
        *step_done(1, "a", version=1),
        Checkpointed(step=1, policy_version=1, train_seconds=3.0),
        evaluated("step-1", 1),
        *step_done(2, "b", "c", version=2),
        evaluated("step-2", 2),
        *step_done(3, "d", version=3),
        *registered(4, "e"),
    ]
    history = read_history(events, exists=everything)
    assert (history.step, history.checkpoint) == (1, events[len(START) + 4])
    assert history.versions == {0: 0, 1: 1}
    assert [plan.episode_uuid for plan in history.planned] == ["b", "c"]
    assert history.outcomes.keys() == {"b", "c"}
    assert history.evaluations.keys() == {"before", "step-1"}
    assert history.next_position == 22


def test_a_checkpoint_that_is_not_on_disk_is_passed_over() -> None:
    events = [
        *START,
        *step_done(1, "a", version=1),
        Checkpointed(step=1, policy_version=1),
        *step_done(2, "b", version=2),
        Checkpointed(step=2, policy_version=2),
    ]
    assert read_history(events, exists=lambda step: step == 1).step == 1
    assert read_history(events, exists=lambda step: False).step == 0


def test_a_second_resumption_stands_on_the_surviving_line_alone() -> None:
    events = [
        *START,
        *step_done(1, "a", version=1),
        Checkpointed(step=1, policy_version=1),
        *step_done(2, "b", version=2),
        *registered(3, "dead"),
        Resumed(step=1),
        PolicyPublished(policy_version=3, step=1),
        PolicyPublished(policy_version=4, step=2),
        StepConsumed(step=2, episode_uuids=["b"]),
        Checkpointed(step=2, policy_version=4),
        *registered(3, "alive"),
        *ended("dead"),
        Discarded(episode_uuids=["dead"], reason="late"),
    ]
    history = read_history(events, exists=everything)
    assert history.step == 2
    assert history.versions == {0: 0, 1: 1, 3: 1, 4: 2}
    assert [plan.episode_uuid for plan in history.planned] == ["alive"]
    assert history.outcomes == {}


def test_a_line_cut_short_is_cut_off_before_anything_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.write([*START, *registered(1, "a", "b"), *ended("a")])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"EpisodeAccepted","episode_u')
    with Journal(path, durable=True) as journal:
        assert [event.episode_uuid for event in journal.unfinished()] == ["b"]
        assert journal.ended("a")
        journal.write([EpisodeFailed(episode_uuid="b", failures=[{"kind": "cancelled"}])])
        assert (journal.unfinished(), journal.cancelled) == ([], 1)
    assert path.read_bytes().startswith(whole)
    assert isinstance(read_journal(path)[-1], EpisodeFailed)


def test_a_step_that_was_misaligned_gets_fresh_episodes() -> None:
    events = [
        *START,
        *step_done(1, "a", "b", version=1),
        Checkpointed(step=1, policy_version=1),
        *registered(2, "c", "d"),
        *ended("c", "d"),
        SetAside(step=2, episode_uuids=["c", "d"], reason="logprobs_shifted"),
    ]
    history = read_history(events, exists=lambda step: True)
    assert history.step == 1
    assert (history.planned, history.outcomes) == ([], {})
    assert history.next_position == 22


def test_a_replayed_group_is_known_from_the_steps_that_survive() -> None:
    events = [
        *START,
        *step_done(1, "a", "b", version=1)[:-1],
        StepConsumed(step=1, episode_uuids=["a", "b"], trained=[["a", "b"]]),
        Checkpointed(step=1, policy_version=1),
        *step_done(2, "c", "d", version=2)[:-1],
        StepConsumed(step=2, episode_uuids=["c", "d"], trained=[["c", "d"], ["a", "b"]]),
    ]
    history = read_history(events, exists=everything)
    assert [event.trained for event in history.consumed] == [[["a", "b"]]]
    assert history.trained.keys() == {"a", "b"}
    undone = read_history(events, exists=lambda step: False)
    assert (undone.consumed, undone.trained) == ([], {})


def run_folder(folder: Path) -> None:
    """A journal of two steps and an evaluation; one episode has two sequences, one group is misaligned."""
    first = make_call(None, [1, 2], [3, 4])
    forked = [first, make_call(None, [1, 9], [5, 6])]
    calls = {"a": [first], "b": [make_call(first, [7], [8, 9])], "c": forked, "d": [first], "e": [first]}
    calls["b"].insert(0, first)
    with Journal(folder / "journal.jsonl") as journal:
        journal.write(
            make_accepted(
                *(uuid, reward, calls[uuid]),
                group_id=group,
                episode_type="eval" if group == "eval" else "train",
            )
            for uuid, group, reward in (
                ("a", "g1", 1.0),
                ("c", "g2", 0.5),
                ("b", "g1", 0.0),
                ("d", "eval", 1.0),
                ("e", "g3", 1.0),
            )
        )
        journal.write([SetAside(step=2, episode_uuids=["e"], reason="shifted")])


def test_a_runs_groups_are_read_from_its_journal(tmp_path: Path) -> None:
    run_folder(tmp_path)
    one, two = recorded_groups(read_journal(tmp_path / "journal.jsonl"))
    assert [(e.episode_uuid, e.reward) for e in one.episodes] == [("a", 1.0), ("b", 0.0)]
    assert [rollout.tokens.tolist() for rollout in one.episodes[1].rollouts] == [[1, 2, 3, 4, 7, 8, 9]]
    assert len(two.episodes[0].rollouts) == 2
    assert {(r.episode_reward, r.env_example_id) for r in two.episodes[0].rollouts} == {(0.5, "g2")}


@pytest.mark.parametrize("trains", [None, False, True])
def test_a_recorded_episode_keeps_its_metadata_and_its_constrained_tokens_train_on_request(
    trains: bool | None,
) -> None:
    call = make_call(None, [1], [2, 3], constrained=bytes([0, 1]))
    result = msgspec.structs.replace(ended("a")[0], all_calls=[call], metadata={"answer": "7"}, group_id="g")
    options = {} if trains is None else {"trains_constrained": trains}
    (group,) = recorded_groups([result], **options)
    (episode,) = group.episodes
    assert (group.group_id, episode.metadata, episode.calls) == ("g", {"answer": "7"}, (call,))
    assert episode.rollouts[0].loss_mask.tolist() == [False, True, bool(trains)]


def test_the_pages_way_to_another_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from pathlib.*?)```", page, re.DOTALL)
    run = re.search(r'Path\("(runs/[^"]+)"\)', code)
    assert run is not None
    monkeypatch.chdir(tmp_path)
    Path(run[1]).mkdir(parents=True)
    run_folder(Path(run[1]))
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["rolled"]["reward"] == [1.0, 0.0]
    again = list(read_parquet(Path(run[1]) / "rollouts.parquet"))
    assert [group.rewards for group in again] == [[1.0, 0.0], [0.5]]


def test_a_recorded_reward_that_would_end_the_run_again_is_a_failure_of_its_episode() -> None:
    events = [*START, *registered(1, "a", "b"), *ended("a", "b")]
    events = [msgspec.structs.replace(e, reward=-1.7e308) if is_result(e, "a") else e for e in events]
    mine = msgspec.structs.replace(ended("c")[0], reward=float(10**7), pool="w", group_id="w/g")
    history = read_history([*events, mine], exists=everything)
    failed = history.outcomes["a"]
    assert isinstance(failed, EpisodeFailed)
    assert "from -1e+06 to 1e+06, got -1.7e+308" in str(failed.failures[-1]["message"])
    assert isinstance(history.outcomes["b"], EpisodeAccepted)
    assert [isinstance(outcome, EpisodeFailed) for outcome in history.from_clients] == [True]


def is_result(event: AnyEvent, uuid: str) -> bool:
    return isinstance(event, EpisodeAccepted) and event.episode_uuid == uuid


def test_a_group_whose_results_were_all_discarded_is_not_waited_for_again() -> None:
    stale = Discarded(episode_uuids=["a", "b"], reason="stale: 2 steps old")
    again = [
        EpisodeRegistered(episode_uuid=uuid, episode_type="train", group_id="again", step=1, position=20)
        for uuid in ("c", "d")
    ]
    history = read_history(
        [*START, *registered(1, "a", "b"), *ended("a", "b"), stale, *again], exists=everything
    )
    assert [plan.episode_uuid for plan in history.planned] == ["c", "d"]
    partly = read_history(
        [*START, *registered(1, "a", "b"), *ended("a", "b"), Discarded(episode_uuids=["a"], reason="stale")],
        exists=everything,
    )
    assert [plan.episode_uuid for plan in partly.planned] == ["a", "b"]


def test_a_clients_result_is_used_again_unless_it_was_used_or_discarded() -> None:
    events: list[AnyEvent] = [
        make_accepted(uuid, pool="w", group_id="w/g")
        for uuid in ("trained", "stale", "misaligned", "undone", "left")
    ]
    events += [
        StepConsumed(step=1, episode_uuids=["trained"]),
        Checkpointed(step=1, policy_version=1),
        Discarded(episode_uuids=["stale"], reason="stale: 3 steps old"),
        SetAside(step=2, episode_uuids=["misaligned"], reason="logprobs_shifted"),
        StepConsumed(step=2, episode_uuids=["undone"]),
    ]
    history = read_history([*START, *events], exists=everything)
    assert history.step == 1
    assert [outcome.episode_uuid for outcome in history.from_clients] == ["undone", "left"]
