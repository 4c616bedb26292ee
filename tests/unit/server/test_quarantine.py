"""Who gets no more episodes: clients whose failures the others' rate of success does not explain."""

from __future__ import annotations

import random

import pytest

from clock import Clock
from tinkerscript.server.episodes.quarantine import MAX_WATCHED, MIN_FAILURES, Quarantine


@pytest.fixture
def quarantine(clock: Clock) -> Quarantine:
    return Quarantine(clock, quarantine_s=600)


def fail(quarantine: Quarantine, name: str, times: int) -> list[list[str]]:
    return [quarantine.failed([name], "ValueError: no disk") for _ in range(times)]


def test_who_only_fails_while_others_succeed_is_named_once(quarantine: Quarantine) -> None:
    assert fail(quarantine, "bad", 1) == [[]]
    for _ in range(20):
        quarantine.succeeded(["good"])
    caught = fail(quarantine, "bad", MIN_FAILURES)
    assert caught == [[]] * (MIN_FAILURES - 2) + [["bad"], []]
    reason = "its last 9 attempts failed while others succeeded: ValueError: no disk"
    assert quarantine.reasons() == {"bad": reason}
    assert quarantine.reason(["good", "bad"]) == f"bad is in quarantine: {reason}"
    assert quarantine.reason(["good"]) == ""


def test_nobody_is_to_blame_where_nobody_succeeds(quarantine: Quarantine) -> None:
    for _ in range(200):
        assert fail(quarantine, "a", 1) == fail(quarantine, "b", 1) == [[]]
    assert quarantine.reasons() == {}


def test_results_before_the_first_failure_say_nothing(quarantine: Quarantine) -> None:
    """The model server may be gone for everybody since then."""
    fail(quarantine, "x", 1)
    for _ in range(1000):
        quarantine.succeeded(["good"])
    assert fail(quarantine, "bad", 100) == [[]] * 100


def test_a_result_ends_the_failures_in_a_row(quarantine: Quarantine) -> None:
    for _ in range(10):
        assert fail(quarantine, "flaky", MIN_FAILURES - 1) == [[]] * (MIN_FAILURES - 1)
        for _ in range(50):
            quarantine.succeeded(["good"])
        quarantine.succeeded(["flaky"])
    assert quarantine.streaks == {}


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7])
def test_clients_of_a_task_that_often_fails_are_left_alone(quarantine: Quarantine, rate: float) -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        name = f"w{rng.randrange(8)}"
        if rng.random() < rate:
            quarantine.succeeded([name])
        else:
            assert quarantine.failed([name], "") == []


def test_it_ends_after_its_time_and_one_more_failure_brings_it_back(
    quarantine: Quarantine, clock: Clock
) -> None:
    fail(quarantine, "bad", 1)
    for _ in range(20):
        quarantine.succeeded(["good"])
    fail(quarantine, "bad", MIN_FAILURES)
    clock.now += 599
    assert quarantine.reasons().keys() == {"bad"}
    clock.now += 2
    assert quarantine.reasons() == {}
    assert fail(quarantine, "bad", 1) == [["bad"]]


def test_who_only_fails_gets_one_episode_a_second_whatever_the_others_do(
    quarantine: Quarantine, clock: Clock
) -> None:
    """The others may be at their start: without a pace, all attempts are used up before they have begun."""
    fail(quarantine, "bad", MIN_FAILURES - 1)
    quarantine.claimed(["bad"])
    assert (quarantine.too_soon(["bad"]), quarantine.is_paced(["bad"])) == ("", False)
    fail(quarantine, "bad", 1)
    assert (quarantine.too_soon(["bad"]), quarantine.is_paced(["bad"])) == ("", True)
    quarantine.claimed(["bad"])
    assert quarantine.too_soon(["bad"]) == (
        "The last 8 attempts of bad failed; until one succeeds, it gets one episode in 1 s. "
        "The last failure: ValueError: no disk"
    )
    assert quarantine.too_soon(["good"]) == ""
    clock.now += 1
    assert quarantine.too_soon(["bad"]) == ""
    quarantine.claimed(["bad"])
    quarantine.succeeded(["bad"])
    assert (quarantine.too_soon(["bad"]), quarantine.is_paced(["bad"])) == ("", False)


def test_it_can_be_switched_off(clock: Clock) -> None:
    quarantine = Quarantine(clock, quarantine_s=0)
    fail(quarantine, "bad", 1)
    for _ in range(20):
        quarantine.succeeded(["good"])
    assert fail(quarantine, "bad", 50) == [[]] * 50


def test_a_client_with_its_own_token_is_known_by_it_whatever_uuid_it_gives(quarantine: Quarantine) -> None:
    caught: list[str] = []
    for number in range(20):
        caught += quarantine.failed([f"client 'uuid-{number}'", "account 'gpu-7'"], "KeyError")
        quarantine.succeeded(["client 'good'"])
        quarantine.succeeded(["client 'good'"])
    assert caught == ["account 'gpu-7'"]


def test_what_a_client_says_is_shown_on_one_short_line(quarantine: Quarantine) -> None:
    fail(quarantine, "bad", 1)
    for _ in range(20):
        quarantine.succeeded(["good"])
    for _ in range(MIN_FAILURES):
        quarantine.failed(["bad"], "\x1b[2J no\n\nway\u2028 " + "x" * 10_000)
    (reason,) = quarantine.reasons().values()
    assert ": [2J no way xxx" in reason
    assert len(reason) < 400


def test_only_so_many_are_watched(quarantine: Quarantine) -> None:
    for number in range(MAX_WATCHED + 5):
        quarantine.failed([str(number)], "")
    assert len(quarantine.streaks) == MAX_WATCHED
    assert "0" not in quarantine.streaks
