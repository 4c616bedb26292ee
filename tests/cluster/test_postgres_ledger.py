"""The ledger in PostgreSQL: the contract of all ledgers, directly and through a pooler, and its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from interchange_helpers import eventually
from ledger_contract import LedgerContract, Reopen, episode, made, rows_in
from postgres_server import PostgresServer, running_pooler, running_postgres
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.ledger import open_ledger, postgres
from tinkerscript.ledger.database_lease import DATABASE_LEASE_S
from tinkerscript.ledger.postgres import PostgresLedger
from tinkerscript.ledger.rows import (
    LEDGER_VERSION,
    AttemptRow,
    EpisodeRow,
    ResultRow,
)


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def pooler(database: PostgresServer) -> Iterator[str]:
    with running_pooler(database) as url:
        yield url


@pytest.fixture
def schema(database: PostgresServer) -> Iterator[str]:
    """Of one test."""
    yield "tried"
    database.query("DROP SCHEMA IF EXISTS tried CASCADE")


Open = Callable[[], PostgresLedger]


@asynccontextmanager
async def ledgers_at(url: str) -> AsyncGenerator[Open]:
    """Opens a ledger of the same run each time."""
    ledgers: list[PostgresLedger] = []

    def open_one() -> PostgresLedger:
        ledgers.append(PostgresLedger(url, Path("run")))
        return ledgers[-1]

    yield open_one
    for ledger in ledgers:
        await ledger.close()


@pytest.fixture
async def opened(database: PostgresServer, schema: str) -> AsyncIterator[Open]:
    async with ledgers_at(f"{database.url}?schema={schema}") as open_one:
        yield open_one


@pytest.fixture(params=["direct", "pooler"])
async def reopen(
    request: pytest.FixtureRequest, database: PostgresServer, pooler: str, schema: str
) -> AsyncIterator[Reopen]:
    url = pooler if request.param == "pooler" else database.url
    async with ledgers_at(f"{url}?schema={schema}") as open_one:
        yield open_one


class TestContract(LedgerContract):
    """With the database, and with a pooler that gives each transaction another session."""


async def test_a_batch_of_several_messages_is_one_transaction(
    opened: Open, database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "MESSAGE_BYTES", 2000)
    ledger, written = opened(), [episode(number, digest=b"x" * 500) for number in range(20)]
    await ledger.lead()
    await ledger.commit(written)
    assert await rows_in(ledger, EpisodeRow) == written
    assert len(database.query("SELECT DISTINCT xmin::text FROM tried.episodes")) == 1
    ledger.note(episode(number) for number in range(30, 40))
    with pytest.raises(StoreError, match="duplicate key"):
        await ledger.commit([episode(41, uuid=episode(39).uuid)])
    assert len(await rows_in(opened(), EpisodeRow)) == 20, "all of a transaction or nothing"


async def test_episodes_are_read_with_sql(opened: Open, database: PostgresServer) -> None:
    ledger = opened()
    await ledger.lead()
    result = made(ResultRow, 1, result=b'{"metadata": {"k": 1}}')
    attempts = [made(AttemptRow, 1, attempt=number, client=f"c{number}") for number in (1, 2)]
    await ledger.commit([episode(uuid="e", state="ended", reward=0.5), *attempts, result])
    episodes = (
        "SELECT uuid, state, reward, (SELECT client FROM tried.attempts WHERE episode = sequence "
        "ORDER BY attempt DESC LIMIT 1) FROM tried.episodes"
    )
    assert database.query(episodes) == [("e", "ended", 0.5, "c2")]
    results = "SELECT convert_from(result, 'UTF8')::json #>> '{metadata,k}' FROM tried.results"
    assert database.query(results) == [("1",)]


async def test_the_next_leader_waits_until_the_lease_runs_out(opened: Open, database: PostgresServer) -> None:
    first, second = opened(), opened()
    assert await first.lead() == 1
    ((expiry,),) = database.query("SELECT expires_at FROM tried.lease")
    taking = asyncio.create_task(second.lead())
    await asyncio.to_thread(database.query, "SELECT pg_sleep_until(%s)", expiry)
    assert not taking.done(), "the first renews its lease"
    await first.commit([episode()])
    await first.close()
    async with asyncio.timeout(DATABASE_LEASE_S / 2):
        assert await taking == 2, "a server that ends gives its lease back"
    assert await rows_in(second, EpisodeRow) == [episode()]


async def test_who_lost_the_lease_writes_nothing(opened: Open, database: PostgresServer) -> None:
    first, second = opened(), opened()
    await first.lead()
    await first.commit([episode()])
    taking = asyncio.create_task(second.lead())

    async def taken() -> bool:
        """The first one may renew its lease between the two."""
        await asyncio.to_thread(
            database.query, "UPDATE tried.lease SET expires_at = '-infinity' WHERE epoch = 1"
        )
        return taking.done()

    await eventually(taken, "the second one's lease")
    assert await taking == 2
    with pytest.raises(StoreError, match="another server serves"):
        await first.commit([episode(2)])
    with pytest.raises(StoreError, match="another server serves"):
        await rows_in(first, EpisodeRow)
    assert await rows_in(second, EpisodeRow) == [episode()]


async def test_an_idle_leader_learns_that_it_lost_the_lease(opened: Open, database: PostgresServer) -> None:
    first = opened()
    await first.lead()
    database.query("UPDATE tried.lease SET epoch = 7")
    async with asyncio.timeout(DATABASE_LEASE_S):
        with pytest.raises(StoreError, match="epoch 1 is over"):
            await first.failed()


async def test_a_transaction_keeps_the_next_leader_waiting(opened: Open, database: PostgresServer) -> None:
    """What one leader has begun to write is written before another one reads."""
    first, second = opened(), opened()
    await first.lead()
    with _connected(database) as holding:
        holding.execute("SELECT tried.fence(1)")
        await first.close()
        taking = asyncio.create_task(second.lead())
        await eventually(lambda: _somebody_waits(database), "a session that waits for the transaction")
        assert not taking.done()
        holding.commit()
    assert await taking == 2


async def test_a_session_that_stops_in_a_transaction_is_ended(opened: Open, database: PostgresServer) -> None:
    """The server that has to take over does not wait for one that is stopped."""
    first, second = opened(), opened()
    await first.lead()
    with _connected(database) as holding:
        holding.execute("SELECT tried.fence(1)")
        await first.close()
        async with asyncio.timeout(4):
            assert await second.lead() == 2
        with pytest.raises(Exception, match="idle-in-transaction"):
            holding.execute("SELECT 1")


async def _somebody_waits(database: PostgresServer) -> bool:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    return (await asyncio.to_thread(database.query, waiting))[0][0] > 0


def _connected(database: PostgresServer) -> Any:
    import psycopg

    return psycopg.connect(database.url)


async def test_a_database_that_does_not_answer_is_given_up(opened: Open, database: PostgresServer) -> None:
    ledger = opened()
    await ledger.lead()
    database.pause()
    try:
        ledger.put(episode())
        writing = asyncio.create_task(ledger.durable())
        async with asyncio.timeout(DATABASE_LEASE_S + 2):
            with pytest.raises(StoreError, match="has not renewed the lease within"):
                await ledger.failed()
            with pytest.raises(StoreError):
                await writing
            with pytest.raises(StoreError):
                await rows_in(ledger, EpisodeRow)
            await ledger.close()
    finally:
        database.go_on()


async def test_a_database_that_is_killed_is_lost_at_once(opened: Open, database: PostgresServer) -> None:
    ledger = opened()
    await ledger.lead()
    await ledger.commit([episode()])
    await asyncio.to_thread(database.kill)
    async with asyncio.timeout(DATABASE_LEASE_S):
        with pytest.raises(StoreError, match="the lease cannot be renewed"):
            await ledger.failed()
    await asyncio.to_thread(database.start)
    again = opened()
    assert await again.lead() == 2
    assert await rows_in(again, EpisodeRow) == [episode()]


async def test_servers_agree_on_the_first_value(opened: Open) -> None:
    first, second = opened(), opened()
    assert await first.agree("secret", b"one") == b"one"
    assert await second.agree("secret", b"two") == b"one"
    assert await second.agree("other", b"two") == b"two"


async def test_another_version_of_the_tables_is_refused(opened: Open, database: PostgresServer) -> None:
    await opened().lead()
    database.query("UPDATE tried.facts SET value = '99' WHERE name = 'version'")
    with pytest.raises(ConfigError, match=f"has version 99, this tinkerscript reads {LEDGER_VERSION}"):
        await opened().lead()
    assert database.query("SELECT epoch FROM tried.lease") == [(1,)], "it has not taken the lease"


@pytest.mark.parametrize(("setting", "durability"), [("synchronous_commit", "normal"), ("fsync", "full")])
async def test_a_database_that_would_lose_commits_is_refused(
    database: PostgresServer, schema: str, setting: str, durability: Any
) -> None:
    """`fsync` is off for all of these tests, which `normal` allows."""
    options = "&options=-c%20synchronous_commit%3Doff" if setting == "synchronous_commit" else ""
    ledger = PostgresLedger(f"{database.url}?schema={schema}{options}", Path("run"), durability=durability)
    with pytest.raises(ConfigError, match=f"{setting} is off"):
        await ledger.lead()
    await ledger.close()


async def test_a_database_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    ledger = open_ledger("postgresql://me:pass%40word@127.0.0.1:1/db", tmp_path)
    with pytest.raises(StoreError, match=r"database db at 127\.0\.0\.1:1") as raised:
        await ledger.lead()
    assert "pass@word" not in str(raised.value)
    await ledger.close()


@pytest.mark.parametrize(
    "url", ["postgresql://h/db?schema=pg_x", "postgresql://h/db?schema=a;b", "postgres://h/?x=1"]
)
def test_a_url_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"interchange_server\.store"):
        open_ledger(url, tmp_path)
