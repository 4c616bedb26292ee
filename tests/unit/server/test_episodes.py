"""The episodes' state machine: its table, fencing, the order of the queue, and a model that it must equal."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from clock import Clock
from tinkerscript.errors import ConflictError, NotTheOwnerError, UnknownEpisodeError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.rows import Use
from tinkerscript.protocol import Failure
from tinkerscript.server.episodes.book import FORGIVEN_KINDS, MAX_FORGIVEN, EpisodeBook
from tinkerscript.server.episodes.record import STATUSES, TRANSITIONS, EpisodeRecord, write_changes
from tinkerscript.server.interchange import read_episodes


@pytest.fixture
def book(clock: Clock) -> EpisodeBook:
    return EpisodeBook(clock=clock, max_attempts=2)


def registered(book: EpisodeBook, *uuids: str) -> None:
    for uuid in uuids:
        book.register(uuid, "train", "g", b"{}")


def claimed(book: EpisodeBook, client: str = "c", lease_s: float = 10.0) -> EpisodeRecord:
    episode = book.claim(client, "any", lease_s)
    assert episode is not None
    return episode


def test_the_table_has_two_states_that_end_an_episode() -> None:
    assert set().union(*TRANSITIONS.values()) == set(TRANSITIONS)
    assert TRANSITIONS["failed"] == {"registered"}, "a retry"
    assert TRANSITIONS["ended"] == {"failed"}, "only if it can never be delivered"


@pytest.mark.parametrize("why", [Use.STALE, Use.LEFT_OUT])
@pytest.mark.parametrize("left", [("a", "b"), ("a",)])
def test_a_group_left_out_is_not_waited_for_again(book: EpisodeBook, why: str, left: tuple[str, ...]) -> None:
    """By a trainer that goes on, whose step collected other groups in its place."""
    for uuid, pool in (("a", ""), ("b", ""), ("mine", "p")):
        book.register(uuid, "train", f"g{pool}", b"{}", pool=pool, step=0 if pool else 1)
        episode = book.claim("c", "any", 10.0, pool=pool)
        assert episode is not None
        book.end(uuid, 1, reward=0.5, result=b"r")
        book.consume(episode.sequence)
    uses = {uuid: why if uuid in (*left, "mine") else Use.TRAINED for uuid in ("a", "b", "mine")}
    assert book.resume(0, 2, {book.get(uuid).sequence: use for uuid, use in uses.items()}) == []
    again = [] if left == ("a", "b") else ["a", "b"]
    assert [each.uuid for each in book.planned(1)] == again
    assert [each.uuid for each in book.open_ends.values()] == again, "nor is a client's own"


@pytest.mark.parametrize("kind", FORGIVEN_KINDS)
def test_a_hand_back_is_no_failed_attempt(book: EpisodeBook, kind: str) -> None:
    """Of a client that is being stopped, or never got the claim. But none can do so for ever."""
    registered(book, "e")
    for attempt in range(1, MAX_FORGIVEN + 1):
        claimed(book)
        for _ in range(2):
            book.abort("e", attempt, Failure(kind=kind, message="the worker was stopped"))
        (closed,) = book.take_changes().closed
        assert closed.fault == ""
        assert book.get("e").state == "registered"
    for attempt in (1, 2):
        assert book.get("e").state == "registered", "max_attempts is 2"
        claimed(book)
        book.abort("e", MAX_FORGIVEN + attempt, Failure(kind=kind))
        assert book.take_changes().closed[0].fault
    assert book.get("e").state == "failed"
    assert len(book.get("e").failures) == MAX_FORGIVEN + 2


def test_an_episode_knows_how_long_it_waited_for_its_last_claim() -> None:
    wall = Clock()
    book = EpisodeBook(clock=Clock(), wall=wall, max_attempts=2)
    registered(book, "e")
    for waits_s in (5.0, 3.0):
        wall.now += waits_s
        episode = claimed(book)
        wall.now += 60.0
        assert episode.queued_s == waits_s
        book.abort("e", episode.attempt, Failure(kind="boom"))
    book.retry("e")
    wall.now += 1.0
    assert claimed(book).queued_s == 1.0
    book.abort("e", 3, Failure(kind="boom"))
    book.get("e").queued_at = 0.0
    assert claimed(book).queued_s is None, "it was queued before the server was started again"


def test_register_is_idempotent_by_content(book: EpisodeBook) -> None:
    registered(book, "e")
    book.take_changes()
    registered(book, "e")
    changes = book.take_changes()
    assert not changes.added
    assert not changes.saved
    with pytest.raises(ConflictError, match="other content"):
        book.register("e", "train", "g", b'{"other": 1}')
    with pytest.raises(ConflictError):
        book.register("e", "eval", "g", b"{}")
    assert len(book) == 1


def test_a_claim_asks_for_a_type(book: EpisodeBook) -> None:
    book.register("t", "train", "", b"{}")
    book.register("v", "eval", "", b"{}")
    assert book.queues.claimable("", "any") == 2
    first = book.claim("c", "eval", 10)
    assert first is not None
    assert first.uuid == "v"
    assert book.claim("c", "eval", 10) is None
    assert claimed(book).uuid == "t"


def test_an_expired_claim_is_fenced_off(book: EpisodeBook, clock: Clock) -> None:
    registered(book, "e")
    episode = claimed(book, "slow")
    clock.now += 9
    book.held("e", 1)
    clock.now += 9
    assert not book.expire(), "activity renewed the lease"
    clock.now += 1
    assert book.expire() == [episode]
    assert book.leases.next_deadline() is None
    claimed(book, "quick")
    late = "claim 1 of episode e no longer holds the lease: lease_expired: no activity for 10 s"
    with pytest.raises(NotTheOwnerError, match=late):
        book.end("e", 1, reward=1, result=b"late")
    with pytest.raises(NotTheOwnerError, match="was never made"):
        book.end("e", 3, reward=1, result=b"forged")
    book.end("e", 2, reward=0, result=b"right")
    assert episode.result == b"right"


def test_attempts_run_out_and_every_failure_is_kept(book: EpisodeBook, clock: Clock) -> None:
    registered(book, "e")
    claimed(book, "one")
    book.abort("e", 1, Failure(kind="task_error", message="scorer raised", attempt=7))
    book.abort("e", 1, Failure(kind="task_error", message="scorer raised"))
    episode = claimed(book, "two")
    clock.now += 10
    book.expire()
    assert episode.state == "failed"
    kinds = [(failure.kind, failure.attempt, failure.client_uuid) for failure in episode.failures]
    assert kinds == [("task_error", 1, "one"), ("lease_expired", 2, "two")]
    assert book.claim("three", "any", 10) is None
    book.consume(episode.sequence)
    assert episode.consumed


def test_changes_name_each_changed_episode_once(book: EpisodeBook) -> None:
    registered(book, "a", "b")
    assert list(book.take_changes().added) == ["a", "b"]
    claimed(book)
    book.end("a", 1, reward=1, result=b"r")
    changes = book.take_changes()
    assert list(changes.saved) == ["a"]
    assert [(closed.attempt, closed.counts) for closed in changes.closed] == [(1, True)]
    assert not book.take_changes().saved


def test_pages_begin_past_a_number_and_hold_so_many(book: EpisodeBook) -> None:
    registered(book, *"abcde")
    for uuid in "dbe":
        book.cancel(uuid, "not needed")
    pages = [book.unfinished(after=after, limit=2) for after in (0, 2, 4, 5)]
    assert [[episode.uuid for episode in page] for page in pages] == [["a", "b"], ["c", "d"], ["e"], []]
    pages = [book.failed(after=after, limit=2) for after in (0, 2, 4, 5)]
    assert [[episode.uuid for episode in page] for page in pages] == [["b", "d"], ["d", "e"], ["e"], []]


def test_who_looks_on_sees_the_oldest_claims_busiest_clients_and_latest_failures(book: EpisodeBook) -> None:
    registered(book, *"abcdef")
    for client in ("one", "two", "two", "three", "three", "three"):
        claimed(book, client)
    assert [episode.uuid for episode in book.oldest_claims(2)] == ["a", "b"]
    assert book.busiest_clients(2) == [("three", 3), ("two", 2)]
    for uuid in "ca":
        book.cancel(uuid, "not needed")
    assert [episode.uuid for episode in book.latest_failed(9)] == ["a", "c"]
    assert [episode.uuid for episode in book.latest_failed(1)] == ["a"]


@pytest.mark.parametrize("outcome", ["ended", "failed"])
def test_what_is_consumed_has_changed_and_keeps_no_payload(book: EpisodeBook, outcome: str) -> None:
    registered(book, "e")
    episode = claimed(book)
    book.consume(episode.sequence)
    assert not episode.consumed, "it has not ended"
    if outcome == "ended":
        book.end("e", 1, reward=0.5, result=b"r")
        assert (episode.reward, episode.result) == (0.5, b"r")
    else:
        book.cancel("e", "not needed")
    book.take_changes()
    assert [*book.open_ends] == [1]
    book.consume(episode.sequence)
    assert book.take_changes().consumed == {episode.sequence: True}
    assert (episode.consumed, episode.payload, episode.result) == (True, b"", b"")
    assert not book.open_ends
    book.consume(episode.sequence)
    assert not book.take_changes().consumed, "it is consumed already"


ENDS: dict[str, Callable[[EpisodeBook], object]] = {
    "none": lambda book: None,
    "a result": lambda book: book.end("e", 1, reward=1, result=b"r"),
    "a failure": lambda book: book.abort("e", 1, Failure(kind="boom")),
    "a cancellation": lambda book: book.cancel("e", "not needed"),
    "another claim": lambda book: (book.abort("e", 1, Failure(kind="boom")), claimed(book)),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("is_new", [True, False])
async def test_a_claim_and_its_end_may_share_a_transaction(
    book: EpisodeBook, tmp_path: Path, end: Callable[[EpisodeBook], object], is_new: bool
) -> None:
    ledger = SqliteLedger(tmp_path / LEDGER_FILE)
    for number, act in enumerate((lambda book: registered(book, "e"), claimed, end)):
        act(book)
        write_changes(ledger, book.take_changes())
        if number == 0 and not is_new:
            await ledger.durable()
    await ledger.durable()
    (found,) = (await read_episodes(ledger)).present
    await ledger.close()
    episode = book.get("e")
    assert (found.state, found.claimants) == (episode.state, episode.claimants)


CLIENTS = st.sampled_from(["ann", "bob", "cy"])
UUIDS = st.sampled_from([f"e{number}" for number in range(6)])
POOLS = st.sampled_from(["", "ann"])
REQUESTS = st.sampled_from(["", "", "r1", "r2", "r3"])
MAX_ATTEMPTS = 3
LEASE_S = 10.0
MAX_CLAIM_S = 25.0


@dataclass
class Modelled:
    """What a reader of the specification expects of one episode."""

    order: int
    pool: str
    state: str = "registered"
    claims: list[str] = field(default_factory=list)
    renewed: float = 0.0
    claimed_at: float = 0.0
    """On the wall's clock."""

    calls: int = 0
    result: bytes = b""
    failures: list[str] = field(default_factory=list)
    forgiven: int = 0
    offered: bool = False
    consumed: bool = False
    dropped: bool = False

    def holds(self, attempt: int) -> bool:
        return self.state == "claimed" and len(self.claims) == attempt


class EpisodesLikeTheModel(RuleBasedStateMachine):
    """Every operation on the book does what a naive model, which scans everything, does.

    Each step is committed to a file; a restart begins from the file alone, with a clock that begins anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.wall = Clock(), Clock()
        self.model: dict[str, Modelled] = {}
        self.requests: dict[tuple[str, str], list[tuple[str, int]]] = {}
        self.calls: list[tuple[str, int]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = SqliteLedger(Path(self.folder.name) / LEDGER_FILE)
        self.runner = asyncio.Runner()
        self.book = self.new_book()

    def teardown(self) -> None:
        self.runner.run(self.ledger.close())
        self.runner.close()
        self.folder.cleanup()

    def new_book(self) -> EpisodeBook:
        return EpisodeBook(
            clock=self.clock, wall=self.wall, max_attempts=MAX_ATTEMPTS, max_claim_s=MAX_CLAIM_S
        )

    def pick(self, data: st.DataObject, *states: str) -> str:
        return data.draw(st.sampled_from([uuid for uuid, each in self.model.items() if each.state in states]))

    @rule(uuid=UUIDS, pool=POOLS)
    def register(self, uuid: str, pool: str) -> None:
        known = self.model.get(uuid)
        if known is not None and known.pool != pool:
            with pytest.raises(ConflictError):
                self.book.register(uuid, "train", "", b"{}", pool=pool)
        else:
            self.book.register(uuid, "train", "", b"{}", pool=pool)
            self.model.setdefault(uuid, Modelled(order=len(self.model), pool=pool))

    @rule(client=CLIENTS, pool=POOLS, request=REQUESTS, number=st.integers(1, 3))
    def claim(self, client: str, pool: str, request: str, number: int) -> None:
        key = (client, request)
        answered = self.book.answered(client, request)
        if request and key in self.requests:
            held = [uuid for uuid, attempt in self.requests[key] if self.model[uuid].holds(attempt)]
            assert answered is not None
            assert [episode.uuid for episode in answered] == held
            return
        assert answered is None
        for _ in range(number):
            self.claim_one(client, pool, request)

    def claim_one(self, client: str, pool: str, request: str) -> None:
        open_ones = [(each.order, u) for u, each in self.model.items() if self.waits_in(each, pool)]
        episode = self.book.claim(client, "any", LEASE_S, pool=pool, claim_request_id=request)
        assert (episode.uuid if episode else None) == (min(open_ones)[1] if open_ones else None)
        if episode:
            each = self.model[episode.uuid]
            each.state, each.calls = "claimed", 0
            each.renewed, each.claimed_at = self.clock.now, self.wall.now
            each.claims.append(client)
            assert episode.attempt == len(each.claims)
            if request:
                self.requests.setdefault((client, request), []).append((episode.uuid, episode.attempt))

    @rule(uuid=UUIDS, attempt=st.integers(0, MAX_ATTEMPTS), result=st.sampled_from([b"x", b"y"]))
    def end(self, uuid: str, attempt: int, result: bytes) -> None:
        each = self.model.get(uuid)
        last = each is not None and attempt == len(each.claims) > 0
        if each is None:
            with pytest.raises(UnknownEpisodeError):
                self.book.end(uuid, attempt, reward=1, result=result)
        elif last and each.state == "claimed":
            self.book.end(uuid, attempt, reward=1, result=result)
            each.state, each.result = "ended", result
        elif last and each.state in ("ended", "accepted"):
            if result == each.result:
                self.book.end(uuid, attempt, reward=1, result=result)
            else:
                with pytest.raises(ConflictError):
                    self.book.end(uuid, attempt, reward=1, result=result)
        else:
            with pytest.raises(NotTheOwnerError):
                self.book.end(uuid, attempt, reward=1, result=result)

    @rule(uuid=UUIDS, attempt=st.integers(0, MAX_ATTEMPTS))
    def renew(self, uuid: str, attempt: int) -> None:
        each = self.model.get(uuid)
        if each and each.holds(attempt):
            self.book.held(uuid, attempt)
            each.renewed = self.clock.now
        else:
            with pytest.raises((NotTheOwnerError, UnknownEpisodeError)):
                self.book.held(uuid, attempt)

    @precondition(lambda self: self.any_in("claimed"))
    @rule(data=st.data())
    def renew_one_that_holds(self, data: st.DataObject) -> None:
        uuid = self.pick(data, "claimed")
        self.renew(uuid, len(self.model[uuid].claims))

    @precondition(lambda self: self.any_in("claimed"))
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        uuid = self.pick(data, "claimed")
        each = self.model[uuid]
        self.book.poison(uuid, len(each.claims), Failure(kind="bad_payload"))
        each.state = "failed"
        each.failures.append("bad_payload")

    @precondition(lambda self: self.any_in("claimed"))
    @rule(data=st.data())
    def begin_call(self, data: st.DataObject) -> None:
        uuid = self.pick(data, "claimed")
        each = self.model[uuid]
        self.book.leases.begin_call(self.book.get(uuid))
        self.calls.append((uuid, len(each.claims)))
        each.calls += 1
        each.renewed = self.clock.now

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def end_call(self, data: st.DataObject) -> None:
        uuid, attempt = call = data.draw(st.sampled_from(self.calls))
        self.calls.remove(call)
        self.book.leases.end_call(self.book.get(uuid), attempt)
        each = self.model[uuid]
        if each.holds(attempt):
            each.calls -= 1
            each.renewed = self.clock.now

    @precondition(lambda self: self.any_in("claimed"))
    @rule(data=st.data(), ends_late=st.booleans())
    def a_call_outlives_its_claim(self, data: st.DataObject, ends_late: bool) -> None:
        """A call begins, its claim is lost and its episode claimed again: the call's end, late or never, is
        nothing to the next claim, whose lease expires as any other."""
        uuid = self.pick(data, "claimed")
        each = self.model[uuid]
        attempt = len(each.claims)
        self.book.leases.begin_call(self.book.get(uuid))
        self.book.abort(uuid, attempt, Failure(kind="aborted"))
        self.lose(each, "aborted")
        while each.state == "registered":
            self.claim_one("cy", each.pool, "")
        if ends_late:
            self.book.leases.end_call(self.book.get(uuid), attempt)
        else:
            self.calls.append((uuid, attempt))
        self.time_passes(LEASE_S)

    @precondition(lambda self: self.any_in("claimed"))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        uuid = self.pick(data, "claimed")
        each = self.model[uuid]
        self.book.abort(uuid, len(each.claims), Failure(kind="aborted"))
        self.lose(each, "aborted")

    @precondition(lambda self: self.any_in("registered"))
    @rule(data=st.data())
    def use_up(self, data: st.DataObject) -> None:
        """All attempts of the pool's oldest episode fail: random steps alone seldom get that far."""
        pool = self.model[self.pick(data, "registered")].pool
        uuid = min((each.order, uuid) for uuid, each in self.model.items() if self.waits_in(each, pool))[1]
        each = self.model[uuid]
        while each.state == "registered":
            self.claim_one("bob", pool, "")
            self.book.abort(uuid, len(each.claims), Failure(kind="aborted"))
            self.lose(each, "aborted")

    def waits_in(self, each: Modelled, pool: str) -> bool:
        return each.state == "registered" and each.pool == pool

    @rule(client=CLIENTS)
    def release_client(self, client: str) -> None:
        self.book.release_client(client, "died")
        for each in self.model.values():
            if each.state == "claimed" and each.claims[-1] == client:
                self.lose(each, "worker_died")

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.wall.now += seconds
        expired = {episode.uuid for episode in self.book.expire()}
        due = {uuid: kind for uuid, each in self.model.items() if (kind := self.why_over(each))}
        assert expired == due.keys()
        for uuid, kind in due.items():
            self.lose(self.model[uuid], kind)
        deadline = self.book.leases.next_deadline()
        assert deadline is None or deadline > self.clock.now
        dues = [self.due_at(each) for each in self.model.values() if each.state == "claimed"]
        assert not dues or (deadline is not None and deadline <= min(dues))

    def why_over(self, each: Modelled) -> str:
        if each.state != "claimed":
            return ""
        if each.claimed_at + MAX_CLAIM_S <= self.wall.now:
            return "claim_expired"
        return "lease_expired" if not each.calls and each.renewed + LEASE_S <= self.clock.now else ""

    def due_at(self, each: Modelled) -> float:
        ends_at = self.clock.now + each.claimed_at + MAX_CLAIM_S - self.wall.now
        return ends_at if each.calls else min(ends_at, each.renewed + LEASE_S)

    @rule(uuid=UUIDS)
    def cancel(self, uuid: str) -> None:
        each = self.model.get(uuid)
        if each and each.state in ("registered", "claimed"):
            assert self.book.cancel(uuid, "enough")
            each.state = "failed"
            each.failures.append("cancelled")
        elif each:
            assert not self.book.cancel(uuid, "enough")

    @rule(uuid=UUIDS)
    def consume(self, uuid: str) -> None:
        each = self.model.get(uuid)
        if each:
            self.book.consume(self.book.get(uuid).sequence)
            each.consumed |= each.state in ("ended", "accepted", "failed")
            if each.state == "ended":
                each.state = "accepted"

    @precondition(lambda self: self.any_in("failed"))
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        uuid = self.pick(data, "failed")
        self.book.offer_failure(uuid)
        self.model[uuid].offered = True

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        uuid = self.pick(data, *(["failed"] if self.any_in("failed") else STATUSES))
        each = self.model[uuid]
        stands = each.consumed or each.offered or each.failures[-1:] == ["cancelled"]
        if each.state != "failed" or stands:
            with pytest.raises(ConflictError):
                self.book.retry(uuid)
        else:
            self.book.retry(uuid)
            each.state, each.forgiven = "registered", len(each.claims)
            if data.draw(st.booleans()):
                self.use_up(data)

    @precondition(lambda self: self.any_in("failed"))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        uuid = self.pick(data, "failed")
        each = self.model[uuid]
        if each.consumed or each.pool:
            self.book.drop(uuid)
            each.consumed = each.dropped = True
        else:
            with pytest.raises(ConflictError, match="its group waits"):
                self.book.drop(uuid)

    @rule(down_s=st.sampled_from([0.0, 3.0, 30.0]))
    def restart(self, down_s: float) -> None:
        self.wall.now += down_s
        self.clock = Clock()
        self.book = self.new_book()
        self.runner.run(self.ledger.durable())
        self.book.restore(self.runner.run(read_episodes(self.ledger)))
        self.calls.clear()
        for each in self.model.values():
            each.renewed, each.calls = self.clock.now, 0
        self.time_passes(0.0)

    def lose(self, each: Modelled, kind: str) -> None:
        each.failures.append(kind)
        each.state = "registered" if len(each.claims) - each.forgiven < MAX_ATTEMPTS else "failed"

    def any_in(self, state: str) -> bool:
        return any(each.state == state for each in self.model.values())

    @invariant()
    def commit(self) -> None:
        """Every step is written before the next, and some of them in one transaction."""

        async def written() -> None:
            write_changes(self.ledger, self.book.take_changes())

        self.runner.run(written())

    @invariant()
    def equals_the_model(self) -> None:
        for uuid, each in self.model.items():
            episode = self.book.get(uuid)
            assert (episode.status, episode.claimants, episode.pool) == (each.state, each.claims, each.pool)
            assert [failure.kind for failure in episode.failures] == each.failures
            assert (episode.consumed, episode.dropped) == (each.consumed, each.dropped)
        in_order = sorted(self.model.items(), key=lambda item: item[1].order)
        unfinished = [uuid for uuid, each in in_order if not each.consumed]
        assert [episode.uuid for episode in self.book.unfinished(after=0, limit=100)] == unfinished
        dead = [uuid for uuid, each in in_order if each.state == "failed" and not each.dropped]
        assert [episode.uuid for episode in self.book.failed(after=0, limit=100)] == dead
        holders = {each.claims[-1] for each in self.model.values() if each.state == "claimed"}
        assert self.book.active_clients == len(holders)
        held = {uuid for uuid, each in self.model.items() if each.state == "claimed"}
        oldest = self.book.oldest_claims(100)
        assert {episode.uuid for episode in oldest} == held
        assert self.book.claims_in_all == len(held)
        assert [episode.claimed_at for episode in oldest] == sorted(each.claimed_at for each in oldest)
        assert {episode.uuid for episode in self.book.latest_failed(100)} == set(dead)

    @invariant()
    def counts_like_the_model(self) -> None:
        counts = self.book.counts
        for state, number in counts.by_type()["train"].model_dump().items():
            assert number == sum(each.state == state for each in self.model.values())
        for pool in ("", "ann"):
            mine = [each for each in self.model.values() if each.pool == pool]
            if mine:
                pools = counts.by_pool()[pool].model_dump()
                assert pools == {state: sum(each.state == state for each in mine) for state in pools}
            assert self.book.queues.claimable(pool, "any") == sum(each.state == "registered" for each in mine)
            assert counts.unfinished(pool) == sum(not each.consumed for each in mine)


CHAOS = settings.get_current_profile_name() == "chaos"
TestEpisodesLikeTheModel = EpisodesLikeTheModel.TestCase
TestEpisodesLikeTheModel.settings = (
    settings() if CHAOS else settings(max_examples=60, stateful_step_count=50, deadline=None)
)
