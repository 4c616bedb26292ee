"""Rates and limits of clients with tokens of their own."""

from __future__ import annotations

import pytest

from clock import Clock
from tinkerscript.config import ClientConfig
from tinkerscript.errors import QuotaError, UnauthorizedError
from tinkerscript.server.accounts import Account, Accounts, Rate
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.metrics import ServerMetrics


def accounts(clock: Clock, *configs: ClientConfig) -> Accounts:
    environ = {config.token_env: f"token of {config.name}" for config in configs}
    return Accounts(
        configs, environ, metrics=ServerMetrics(EpisodeBook(clock=clock, max_attempts=1)), clock=clock
    )


def account(clock: Clock, **limits: int) -> Account:
    config = ClientConfig.model_validate({"name": "ann", "token_env": "ANN"} | limits)
    found = accounts(clock, config).of("Bearer token of ann")
    assert found is not None
    return found


def test_a_rate_lets_a_minutes_worth_pass_and_then_as_much_as_comes_back(clock: Clock) -> None:
    rate = Rate(60, clock)
    assert rate.wait_s(60) == 0
    rate.take(60)
    assert rate.wait_s(5) == pytest.approx(5)
    clock.now += 5
    assert rate.wait_s(5) == 0
    clock.now += 1000
    assert (rate.wait_s(60), rate.wait_s(61)) == (0, pytest.approx(1)), "no more than a minute's worth"


def test_what_is_refused_uses_nothing_up(clock: Clock) -> None:
    ann = account(clock, registrations_per_minute=2, bytes_per_minute=1024)
    ann.send(b"x" * 1000, registrations=1)
    with pytest.raises(QuotaError, match=r"ann\.bytes_per_minute") as caught:
        ann.send(b"x" * 100, registrations=1)
    assert caught.value.retry_after_s == pytest.approx(76 * 60 / 1024)
    ann.send(b"", registrations=1)
    with pytest.raises(QuotaError, match=r"ann\.registrations_per_minute"):
        ann.send(b"", registrations=1)
    with pytest.raises(UnauthorizedError, match="3 at once is more") as never:
        ann.send(b"", registrations=3)
    assert never.value.status == 403


def test_claims_are_counted_until_they_are_over(clock: Clock) -> None:
    both = [ClientConfig(name=name, token_env=name, max_claims=2) for name in ("ann", "bob")]
    known = accounts(clock, *both)
    ann, bob = known.of("Bearer token of ann"), known.of("Bearer token of bob")
    assert ann is not None
    assert bob is not None
    ann.hold("e", 1)
    ann.hold("f", 1)
    with pytest.raises(QuotaError, match=r"ann\.max_claims"):
        ann.check_claims()
    with bob.waiting():
        bob.check_claims()
        with bob.waiting(), pytest.raises(QuotaError, match=r"bob' holds or waits for 2 claims"):
            bob.check_claims()
    assert (known.holder("e", 1), known.holder("e", 2)) == (ann, None)
    for _ in range(2):
        known.forget("e", 1)
    known.forget("nobody's", 1)
    assert (ann.free_claims, bob.free_claims) == (1, 2)


def test_claims_from_before_a_restart_still_count(clock: Clock) -> None:
    book = EpisodeBook(clock=clock, max_attempts=1)
    for name, owner in {"e": "ann/w", "f": "ann", "g": "cid/w"}.items():
        book.register(name, "train", "g", b"{}")
        assert book.claim(owner, "any", 60) is not None
    book.register("open", "train", "g", b"{}")
    known = accounts(clock, ClientConfig(name="ann", token_env="ANN", max_claims=1))
    known.restore(book)
    ann = known.of("Bearer token of ann")
    assert ann is not None
    assert (ann.free_claims, known.holder("e", 1), known.holder("f", 1)) == (0, ann, None)
    known.forget("e", 1)
    assert ann.free_claims == 1


def test_nobody_claims_in_the_name_of_a_client_with_its_own_token(clock: Clock) -> None:
    known = accounts(clock, ClientConfig(name="ann", token_env="ANN"))
    ann = known.of("Bearer token of ann")
    assert known.owner("w", ann) == "ann/w"
    assert [known.owner(name, None) for name in ("w", "ann", "bob/w")] == ["w", "ann", "bob/w"]
    with pytest.raises(UnauthorizedError, match="'ann/w' is a name of client 'ann'") as refused:
        known.owner("ann/w", None)
    assert refused.value.status == 403


@pytest.mark.parametrize("header", ["", "Bearer ", "Bearer token of an", "token of ann ", "Bearer t\xf6ken"])
def test_only_its_token_is_a_client(clock: Clock, header: str) -> None:
    assert accounts(clock, ClientConfig(name="ann", token_env="ANN")).of(header) is None
