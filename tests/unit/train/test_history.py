"""What a journal says about where a run stands, and what of it may still be used."""

from __future__ import annotations

from pathlib import Path

from tinkerscript.train.history import read_history
from tinkerscript.train.journal import (
    AnyEvent,
    Checkpointed,
    Discarded,
    EpisodeAccepted,
    EpisodeFailed,
    EpisodeRegistered,
    Evaluated,
    Journal,
    PolicyPublished,
    Resumed,
    SetAside,
    StepConsumed,
    read_journal,
)


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
    return [
        EpisodeAccepted(
            episode_uuid=uuid, attempt=1, client_uuid="w", reward=1, policy_version_at_claim=0, calls=[]
        )
        for uuid in uuids
    ]


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


def test_a_clients_result_is_used_again_unless_it_was_used_or_discarded() -> None:
    events: list[AnyEvent] = [
        EpisodeAccepted(
            episode_uuid=uuid,
            attempt=1,
            client_uuid="w",
            reward=1,
            policy_version_at_claim=0,
            calls=[],
            pool="w",
            group_id="w/g",
        )
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
