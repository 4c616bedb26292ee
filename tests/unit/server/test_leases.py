"""Leases on a clock that is moved by hand: what renews them, when they expire, how long they last."""

from __future__ import annotations

import pytest

from tinkerscript.server.episodes.indexes import Leases
from tinkerscript.server.episodes.record import EpisodeRecord

UNIX = 1_000_000.0
"""The wall clock's time when the other one shows 0."""


class Clocks:
    """A clock that starts at 100, and the wall clock beside it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.leases = Leases(lambda: self.now, lambda: UNIX + self.now, max_claim_s=60.0)

    def claimed(self, lease_s: float = 10.0, *, age_s: float = 0.0, sequence: int = 1) -> EpisodeRecord:
        """An episode whose only claim was made `age_s` seconds ago and starts its lease."""
        episode = EpisodeRecord(
            uuid=f"e{sequence}",
            sequence=sequence,
            episode_type="train",
            group_id="g",
            digest=b"",
            payload=b"",
            state="claimed",
            claimants=["c"],
            lease_s=lease_s,
            claimed_at=UNIX + self.now - age_s,
        )
        self.leases.start(episode)
        return episode


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_a_lease_expires_at_its_deadline(clocks: Clocks) -> None:
    episode = clocks.claimed()
    assert clocks.leases.next_deadline() == 110.0
    clocks.now = 109.9
    assert clocks.leases.find_expired() is None
    clocks.now = 110.0
    assert clocks.leases.find_expired() == (episode, "lease_expired", "no activity for 10 s")


def test_a_call_renews_when_it_begins_and_when_it_ends(clocks: Clocks) -> None:
    episode = clocks.claimed()
    clocks.now = 105.0
    clocks.leases.begin_call(episode)
    assert (episode.calls_in_flight, clocks.leases.next_deadline()) == (1, 115.0)
    clocks.now = 120.0
    assert clocks.leases.find_expired() is None, "the call in flight is activity"
    clocks.now = 122.0
    clocks.leases.end_call(episode, 1)
    assert (episode.calls_in_flight, clocks.leases.next_deadline()) == (0, 132.0)
    clocks.now = 132.0
    assert clocks.leases.find_expired() == (episode, "lease_expired", "no activity for 10 s")


def test_calls_in_flight_are_counted(clocks: Clocks) -> None:
    episode = clocks.claimed()
    clocks.leases.begin_call(episode)
    clocks.leases.begin_call(episode)
    clocks.leases.end_call(episode, 1)
    clocks.now = 115.0
    assert clocks.leases.find_expired() is None
    clocks.leases.end_call(episode, 1)
    clocks.now = 125.0
    assert clocks.leases.find_expired() is not None


def test_a_claim_ends_with_its_lifetime_however_active_it_is(clocks: Clocks) -> None:
    episode = clocks.claimed(lease_s=100.0)
    clocks.now = 110.0
    clocks.leases.begin_call(episode)
    assert clocks.leases.next_deadline() == 160.0
    clocks.now = 160.0
    assert clocks.leases.find_expired() == (episode, "claim_expired", "the claim exceeded its limit of 60 s")


def test_a_lifetime_goes_on_over_a_restart(clocks: Clocks) -> None:
    assert clocks.leases.left_s(clocks.claimed(age_s=45.0)) == 15.0
    assert clocks.leases.left_s(clocks.claimed(age_s=-5.0, sequence=2)) == 60.0, "the wall clock was set back"


def test_what_is_left_of_a_claim(clocks: Clocks) -> None:
    episode = clocks.claimed()
    clocks.now = 159.75
    assert clocks.leases.left_s(episode) == 0.25
    clocks.now = 161.0
    assert clocks.leases.left_s(episode) == 0.0


def test_the_last_activity_is_unix_time(clocks: Clocks) -> None:
    episode = clocks.claimed()
    clocks.now = 104.0
    assert clocks.leases.last_activity(episode) == UNIX + 100.0
    clocks.leases.renew(episode)
    clocks.now = 107.0
    assert clocks.leases.last_activity(episode) == UNIX + 104.0
    clocks.leases.begin_call(episode)
    clocks.now = 109.0
    assert clocks.leases.last_activity(episode) == UNIX + 109.0, "a call is in flight"
    episode.claimed_at = UNIX + 200.0
    assert clocks.leases.last_activity(episode) == UNIX + 200.0, "the wall clock was set back"
    episode.renewed_at = 0.0
    assert clocks.leases.last_activity(episode) == UNIX + 200.0, "none in this process"


def test_the_earliest_deadline_is_found_among_many(clocks: Clocks) -> None:
    late, early = clocks.claimed(30.0, sequence=1), clocks.claimed(20.0, sequence=2)
    over = clocks.claimed(5.0, sequence=3)
    over.state = "ended"
    assert clocks.leases.next_deadline() == 120.0
    clocks.now = 115.0
    clocks.leases.renew(early)
    assert clocks.leases.next_deadline() == 130.0
    late.state = "registered"
    assert clocks.leases.next_deadline() == 135.0
    early.claimants.append("d")
    assert clocks.leases.next_deadline() is None, "the entry is of the claim before"
