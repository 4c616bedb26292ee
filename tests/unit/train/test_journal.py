"""The trainer's journal survives kills and counts what is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkerscript.errors import ConfigError
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs
from tinkerscript.train.journal import (
    EpisodeAccepted,
    EpisodeFailed,
    EpisodeRegistered,
    Journal,
    lost_episodes,
    read_journal,
)


def accepted(uuid: str, *, retries: int = 0) -> EpisodeAccepted:
    call = Call(
        call_id="c",
        parent_id=None,
        new_prompt=pack_ids([1, 2]),
        sampled=pack_ids([3]),
        logprobs=pack_logprobs([-0.5]),
        stop_reason="stop",
        policy_version=4,
        constrained=bytes([2]),
    )
    return EpisodeAccepted(
        episode_uuid=uuid,
        attempt=1 + retries,
        client_uuid="w",
        reward=0.5,
        policy_version_at_claim=4,
        calls=[call],
        metadata={"answer": "7"},
        retries=[{"kind": "lease_expired"}] * retries,
    )


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
            journal.write([registered(uuid), accepted(uuid)], durable=once)
            assert synced == ([(tmp_path / "j").stat().st_size] if always or once else [])
