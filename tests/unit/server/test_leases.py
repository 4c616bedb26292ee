"""Leases on a clock that is moved by hand: what renews them, when they expire, how long they last."""

from __future__ import annotations

import pytest

from episode_records import record
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
        claim = {"state": "claimed", "claimants": ["c"], "claimed_at": UNIX + self.now - age_s}
        episode = record(f"e{sequence}", sequence=sequence, lease_s=lease_s, **claim)
        self.leases.start(episode)
        return episode


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_a_lifetime_goes_on_over_a_restart(clocks: Clocks) -> None:
    assert clocks.leases.left_s(clocks.claimed(age_s=45.0)) == 15.0
    assert clocks.leases.left_s(clocks.claimed(age_s=-5.0, sequence=2)) == 60.0, "the wall clock was set back"


def test_what_is_left_of_a_claim(clocks: Clocks) -> None:
    episode = clocks.claimed()
    clocks.now = 159.75
    assert clocks.leases.left_s(episode) == 0.25
    clocks.now = 161.0
    assert clocks.leases.left_s(episode) == 0.0


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


def test_a_short_lease_keeps_nobody_busy_while_a_call_is_in_flight(clocks: Clocks) -> None:
    """A client chooses its lease: one of 10 ms would be renewed a hundred times a second."""
    episode = clocks.claimed(0.01)
    clocks.leases.begin_call(episode)
    clocks.now += 0.02
    assert clocks.leases.find_expired() is None
    assert clocks.leases.next_deadline() == clocks.now + 1.0
    clocks.leases.end_call(episode, 1)
    clocks.now += 1.0
    found = clocks.leases.find_expired()
    assert found is not None
    assert found[0] is episode
