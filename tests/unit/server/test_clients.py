"""Clients: whose failures the others' success does not explain, what a token allows, and the run's end."""

from __future__ import annotations

import asyncio
import random

import pytest

from clock import Clock
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN, Roles
from tinkerscript.config import ClientConfig, InterchangeConfig
from tinkerscript.errors import ConfigError, QuotaError, UnauthorizedError
from tinkerscript.server.clients import MAX_CLIENTS, MIN_FAILURES, POLLING_S, QUARANTINE_S, Clients, RunEnd

REASON = "its last 9 attempts failed while others succeeded: ValueError: no disk"


@pytest.fixture
def clients(clock: Clock) -> Clients:
    return Clients(clock, {"ann": 2, "bob": 2})


def fail(clients: Clients, name: str, times: int) -> list[list[str]]:
    return [clients.failed(name, "ValueError: no disk") for _ in range(times)]


def succeed(clients: Clients, name: str, times: int) -> None:
    for _ in range(times):
        clients.succeeded(name)


def break_down(clients: Clients, name: str = "bad") -> list[list[str]]:
    """Bring a client into quarantine."""
    fail(clients, name, 1)
    succeed(clients, "good", 20)
    return fail(clients, name, MIN_FAILURES)


def test_a_client_that_only_fails_while_others_succeed_is_named_once(clients: Clients) -> None:
    assert break_down(clients) == [[]] * (MIN_FAILURES - 2) + [["bad"], []]
    assert clients.quarantined() == {"bad": REASON}
    assert clients.pause("bad") == (f"client 'bad' is in quarantine: {REASON}", True)
    assert clients.pause("good") is None


def test_what_is_no_longer_in_quarantine_is_forgotten_beyond_a_number(
    clients: Clients, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may take a new name each time."""
    monkeypatch.setattr("tinkerscript.server.clients.MAX_CLIENTS", 4)
    for number in range(20):
        break_down(clients, f"bad-{number}")
        clock.now += QUARANTINE_S / 2
    assert [*clients.quarantined()] == ["bad-19"]
    assert sum(record.failures > 0 for record in map(clients.seen, (f"bad-{n}" for n in range(20)))) <= 5


def test_no_client_is_to_blame_if_none_succeeds(clients: Clients) -> None:
    for _ in range(200):
        assert fail(clients, "a", 1) == fail(clients, "b", 1) == [[]]
    assert clients.quarantined() == {}


def test_results_before_the_first_failure_prove_nothing(clients: Clients) -> None:
    """The model server may have gone away for everybody since then."""
    fail(clients, "x", 1)
    succeed(clients, "good", 1000)
    assert fail(clients, "bad", 100) == [[]] * 100


def test_a_result_ends_the_failures_in_a_row(clients: Clients) -> None:
    for _ in range(10):
        assert fail(clients, "flaky", MIN_FAILURES - 1) == [[]] * (MIN_FAILURES - 1)
        succeed(clients, "good", 50)
        succeed(clients, "flaky", 1)
    break_down(clients)
    succeed(clients, "bad", 1)
    assert (clients.quarantined(), clients.pause("bad"), clients.is_paced("bad")) == ({}, None, False)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7])
def test_clients_of_a_task_that_often_fails_are_left_alone(clients: Clients, rate: float) -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        name = f"w{rng.randrange(8)}"
        if rng.random() < rate:
            clients.succeeded(name)
        else:
            assert clients.failed(name, "") == []


def test_quarantine_ends_in_time_and_one_more_failure_brings_it_back(clients: Clients, clock: Clock) -> None:
    break_down(clients)
    clock.now += 599
    assert clients.quarantined().keys() == {"bad"}
    clock.now += 2
    assert clients.quarantined() == {}
    assert fail(clients, "bad", 1) == [["bad"]]


def test_a_client_that_only_fails_gets_one_episode_a_second(clients: Clients, clock: Clock) -> None:
    """The others may be at their start: without a pace, all attempts are used up before they have begun."""
    fail(clients, "bad", MIN_FAILURES - 1)
    clients.claimed("bad")
    assert (clients.pause("bad"), clients.is_paced("bad")) == (None, False)
    clock.now += 2
    fail(clients, "bad", 1)
    assert (clients.pause("bad"), clients.is_paced("bad")) == (None, True)
    clients.claimed("bad")
    assert clients.pause("bad") == (
        "The last 8 attempts of client 'bad' failed; until one succeeds, it gets one episode in 1 s. "
        "The last failure: ValueError: no disk",
        False,
    )
    clock.now += 1
    assert clients.pause("bad") is None


def test_the_failures_of_the_trainers_own_workers_are_the_runs(clients: Clients) -> None:
    clients.own_prefix = "worker-1-"
    assert break_down(clients, "worker-1-0") == [[]] * MIN_FAILURES
    assert not clients.is_paced("worker-1-0")
    record = clients.record("worker-1-0")
    assert record is not None
    assert record.failed == MIN_FAILURES + 1


def test_an_operator_stops_a_client_for_good(clients: Clients, clock: Clock) -> None:
    clients.stop("odd")
    succeed(clients, "odd", 1)
    clock.now += 10**6
    assert clients.pause("odd") == ("client 'odd' is in quarantine: an operator has stopped it", True)
    clients.stop("ann/")
    assert clients.pause("ann/any") is not None


def test_a_new_uuid_does_not_help_a_client_with_its_own_token(clients: Clients) -> None:
    caught = list[str]()
    for number in range(20):
        caught += clients.failed(f"ann/{number}", "KeyError")
        succeed(clients, "good", 2)
    assert caught == ["ann/"]
    assert clients.pause("ann/new") is not None


def test_only_the_clients_that_came_last_are_remembered(clients: Clients) -> None:
    break_down(clients)
    for number in range(MAX_CLIENTS + 2):
        clients.seen(str(number))
    clients.seen("5")
    assert clients.latest(2) == ["5", str(MAX_CLIENTS + 1)]
    assert (clients.record("0"), clients.record("1")) == (None, None)
    assert clients.quarantined().keys() == {"bad"}, "whoever comes in between"
    clients.seen("bad")
    assert clients.pause("bad") is not None


def test_a_token_bounds_claims_and_requests_that_wait(clients: Clients) -> None:
    clients.claimed("ann/w")
    clients.claimed("ann/v")
    with pytest.raises(QuotaError, match=r"ann\.max_claims"):
        clients.check_waiting("ann/w", "an episode")
    with clients.waiting("ann/w", "the run's end"), clients.waiting("bob/w", "an episode"):
        clients.check_waiting("bob/w", "an episode")
        with clients.waiting("bob/v", "an episode"), pytest.raises(QuotaError, match="'bob' holds or waits"):
            clients.check_waiting("bob/w", "an episode")
    clients.closed("ann/v")
    assert (clients.free_claims("ann/x"), clients.free_claims("bob/w")) == (1, 2)
    assert clients.free_claims("w") > 10**9, "the shared token has no such limit"


def test_nobody_claims_in_the_name_of_a_client_with_its_own_token(clients: Clients) -> None:
    assert clients.owner("w", "ann") == "ann/w"
    assert [clients.owner(name, "") for name in ("w", "ann", "cid/w")] == ["w", "ann", "cid/w"]
    with pytest.raises(UnauthorizedError, match="'ann/w' is a name of client 'ann'") as refused:
        clients.owner("ann/w", "")
    assert refused.value.status == 403
    for pool in ("", "ann"):
        clients.check_pool("ann", pool)
    with pytest.raises(UnauthorizedError, match="not 'bob'"):
        clients.check_pool("ann", "bob")


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer token of an", "token of ann ", "Bearer t\xf6ken"])
def test_only_its_token_is_a_client(header: str) -> None:
    section = InterchangeConfig(clients=[ClientConfig(name="ann", token_env="ANN")])
    roles = Roles.of(section, {CLIENT_TOKEN: "c", ADMIN_TOKEN: "a", "ANN": "token of ann"})
    scope = {"headers": [(b"authorization", b"Bearer token of ann")]}
    assert roles.account(scope) == "ann"
    assert roles.account({"headers": [(b"authorization", header.encode("latin-1"))]}) == ""


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "anyone may enter"),
        ({CLIENT_TOKEN: "c", ADMIN_TOKEN: "a"}, "set ANN, or ANN_FILE"),
        ({CLIENT_TOKEN: "c", ADMIN_TOKEN: "a", "ANN": "a"}, "is not unique"),
    ],
)
def test_tokens_of_clients_are_their_own(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Roles.of(InterchangeConfig(clients=[ClientConfig(name="ann", token_env="ANN")]), environ)


async def test_clients_that_wait_learn_of_the_runs_end_at_once(clients: Clients) -> None:
    end = RunEnd(clients)
    waiting = [asyncio.create_task(end.wait(f"c{number}", 3600)) for number in range(3)]
    await asyncio.sleep(0)
    end.set(True)
    assert await asyncio.gather(*waiting) == [True] * 3
    assert await end.wait("later", 3600)
    end.set(False)
    assert not await end.wait("c1", 0.0), "another trainer goes on"
    closing = asyncio.create_task(end.wait("c", 3600))
    await asyncio.sleep(0)
    end.close()
    assert not await closing


async def test_a_server_stays_until_recent_clients_know_of_the_end(clients: Clients, clock: Clock) -> None:
    end = RunEnd(clients, shutdown_s=3600)
    await end.known_to_all()  # The run goes on: nobody is waited for.
    clients.seen("gone long ago")
    clock.now += POLLING_S + 1
    clients.seen("works")
    clients.seen("waits")
    end.set(True)
    stopping = asyncio.create_task(end.known_to_all())
    assert await end.wait("waits", 0.0)
    await asyncio.sleep(0)
    assert not stopping.done(), "one that works on an episode has not asked yet"
    end.knows("works")
    await stopping


async def test_a_client_that_is_dead_keeps_a_server_for_a_moment_only(clients: Clients) -> None:
    clients.seen("dead")
    end = RunEnd(clients, shutdown_s=0.01)
    end.set(True)
    await asyncio.wait_for(end.known_to_all(), timeout=10)
