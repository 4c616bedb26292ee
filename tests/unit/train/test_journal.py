"""The trainer's journal survives kills and counts what is lost."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from rollout_helpers import make_accepted, make_call
from tinkerscript.errors import ConfigError
from tinkerscript.train.journal import (
    QUARANTINED,
    Discarded,
    EpisodeRegistered,
    Journal,
    PolicyPublished,
    SetAside,
    lost_episodes,
    read_journal,
    usable,
)
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed


def accepted(uuid: str, *, retries: int = 0) -> EpisodeAccepted:
    call = make_call(None, [1, 2], [3], policy_version=4, constrained=bytes([2]))
    failures = [{"kind": "lease_expired"}] * retries
    return make_accepted(uuid, 0.5, [call], attempt=1 + retries, metadata={"answer": "7"}, retries=failures)


def registered(uuid: str, episode_type: str = "train") -> EpisodeRegistered:
    return EpisodeRegistered(episode_uuid=uuid, episode_type=episode_type, group_id="g")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    failed = EpisodeFailed(episode_uuid="b", failures=[])
    events = [registered("a"), accepted("a", retries=2), registered("b"), failed]
    with Journal(tmp_path / "j") as journal:
        journal.write(events)
    assert read_journal(tmp_path / "j") == events
    assert (journal.count("train", "accepted"), journal.count("train", "failed")) == (1, 1)
    assert journal.retries == 2


def test_a_journal_counts_what_it_holds_also_when_it_is_opened_again(tmp_path: Path) -> None:
    cancelled = EpisodeFailed(episode_uuid="c", failures=[{"kind": "task_error"}, {"kind": "cancelled"}])
    failed = EpisodeFailed(episode_uuid="d", failures=[{"kind": "cancelled"}, {"kind": "task_error"}])
    plans = [msgspec.structs.replace(registered(uuid), step=1) for uuid in "ac"]
    with Journal(tmp_path / "j") as journal:
        assert journal.policy_version == -1
        journal.write([*plans, registered("b", "eval"), registered("d"), registered("open")])
        journal.write([accepted("a", retries=1), accepted("b", retries=2), cancelled, failed])
        journal.write([PolicyPublished(policy_version=2), PolicyPublished(policy_version=1)])
        journal.write([Discarded(episode_uuids=["a"], reason="stale")])
        journal.write([SetAside(step=1, episode_uuids=["b", "d"], reason="misaligned")])
    for each in (journal, Journal(tmp_path / "j")):
        with each:
            assert (each.retries, each.cancelled, each.discarded, each.policy_version) == (3, 1, 3, 2)
            assert [plan.episode_uuid for plan in each.unfinished()] == ["open"]
            assert [each.ended(uuid) for uuid in ("a", "d", "open", "unknown")] == [True, True, False, False]
            assert (each.count("train", "accepted"), each.count("train", "failed")) == (1, 2)
            assert (each.count("eval", "accepted"), each.count("eval", "failed")) == (1, 0)
            assert each.count("train", "failed", planned_only=True) == 1
            assert each.count("eval", "accepted", planned_only=True) == 0


def test_a_reward_out_of_bounds_is_a_failure_with_every_earlier_one() -> None:
    result = msgspec.structs.replace(
        accepted("a", retries=1), reward=1e30, episode_type="eval", pool="p", group_id="g", group_size=4
    )
    failed = usable(result)
    assert isinstance(failed, EpisodeFailed)
    assert (failed.episode_uuid, failed.episode_type, failed.pool) == ("a", "eval", "p")
    assert (failed.group_id, failed.group_size) == ("g", 4)
    earlier, last = failed.failures
    assert earlier == {"kind": "lease_expired"}
    assert (last["kind"], last["attempt"], last["client_uuid"]) == (QUARANTINED, 2, "w")
    assert "1e+30" in str(last["message"])
    assert not failed.is_cancelled
    for outcome in (failed, accepted("a")):
        assert usable(outcome) is outcome


def test_a_line_cut_short_by_a_kill_is_ignored(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.write([registered("a"), accepted("a")])
    whole = (tmp_path / "j").read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        (tmp_path / "j").write_bytes(whole[:length])
        assert read_journal(tmp_path / "j") == [registered("a")]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b'{"type":"Nonsense"}\n')
    with pytest.raises(ConfigError, match="line 1 is not a journal event"):
        read_journal(tmp_path / "j")


def test_lost_is_registered_minus_ended_in_both_records(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.write([registered(uuid) for uuid in "abc"])
        assert lost_episodes(journal, None) == ["a", "b", "c"]
        journal.write([accepted("a"), EpisodeFailed(episode_uuid="b", failures=[]), accepted("c")])
        server = {"a": "accepted", "b": "failed", "c": "accepted"}
        assert lost_episodes(journal, None) == []
        assert lost_episodes(journal, server) == []
        for uuid in "abc":
            without = {key: value for key, value in server.items() if key != uuid}
            assert lost_episodes(journal, without) == [uuid]
        assert lost_episodes(journal, server | {"b": "accepted"}) == ["b"]


@pytest.mark.parametrize(("always", "once"), [(False, False), (True, False), (False, True)])
def test_a_durable_write_is_synced_whole_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: bool, once: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("tinkerscript.train.journal.os.fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with Journal(tmp_path / "j", durable=always) as journal:
        for uuid in "ab":
            synced.clear()
            journal.write([registered(uuid), accepted(uuid)], **({"durable": True} if once else {}))
            assert synced == ([(tmp_path / "j").stat().st_size] if always or once else [])
