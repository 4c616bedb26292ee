"""The ledger in SQLite: it keeps the contract of all ledgers, and says what is wrong with a file."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from ledger_contract import ANY_BYTES, LedgerContract, Reopen, episode, made
from rollout_helpers import make_call
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.files import LEDGER_FILE, RUN_ID, is_foreign
from tinkerscript.ledger import Ledger, SqliteLedger, is_here, is_shared, open_ledger
from tinkerscript.ledger.ledger import WriteBatch, call_row
from tinkerscript.ledger.rows import (
    LEDGER_VERSION,
    TABLES,
    AttemptRow,
    CallRow,
    EpisodeRow,
    ImageRow,
    MetricRow,
    PublicationRow,
    ResultRow,
    Row,
    SampleRow,
    StepRow,
    TokensRow,
    TrainedRow,
    TranscriptRow,
    Use,
    column_types,
    create_statements,
)
from tinkerscript.ledger.tokens import TokenUse

Durability = Literal["normal", "full"]


@pytest.fixture(params=["normal", "full"])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reopen]:
    opened: list[SqliteLedger] = []

    def open_one() -> Ledger:
        opened.append(SqliteLedger(tmp_path / LEDGER_FILE, durability=request.param))
        return opened[-1]

    yield open_one
    for ledger in opened:
        await ledger.close()


class TestContract(LedgerContract):
    """In a file, whose commits are synced or not."""


class FullDisk(SqliteLedger):
    """A ledger whose error is not one of its database."""

    async def write(self, batch: WriteBatch) -> None:
        raise OSError("no space left on device")


async def test_any_error_of_a_write_is_a_store_error_which_somebody_gets(tmp_path: Path) -> None:
    ledger, unwatched = (FullDisk(tmp_path / name) for name in ("a.sqlite", "b.sqlite"))
    with pytest.raises(StoreError, match="no space left"):
        await ledger.commit([episode()])
    with pytest.raises(StoreError, match="no space left"):
        await ledger.failed()
    await ledger.close()
    unwatched.put(episode())
    with pytest.raises(StoreError, match="no space left"):
        await unwatched.close()


async def test_a_ledger_is_opened_by_its_url(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    for url, path in {"sqlite": tmp_path / LEDGER_FILE, f"sqlite://{other}": other}.items():
        assert (is_shared(url), is_here(url, tmp_path), path.exists()) == (False, False, False)
        ledger = open_ledger(url, tmp_path)
        assert (is_here(url, tmp_path), path.exists()) == (True, True)
        await ledger.close()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
async def test_postgresql_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    url = f"{scheme}://nobody@host/runs"
    assert (is_shared(url), is_here(url, tmp_path)) == (True, True)
    ledger = open_ledger(url, tmp_path)
    assert ledger.is_shared
    with pytest.raises(
        StoreError, match=f"database .*runs.*schema .*{tmp_path.name}.*: nothing can be written"
    ):
        await ledger.commit([episode()])
    await ledger.close()
    monkeypatch.setitem(sys.modules, "tinkerscript.ledger.postgres", None)
    with pytest.raises(ConfigError, match=r"needs psycopg .*pip install 'tinkerscript\[postgres\]'"):
        open_ledger(url, tmp_path)


async def test_a_file_is_of_one_server(ledger: SqliteLedger) -> None:
    assert (ledger.is_shared, await ledger.lead()) == (False, 0)
    assert [await ledger.agree("key", value) for value in (b"a", b"b")] == [b"a", b"b"]


@pytest.mark.parametrize("url", ["mysql://host/db", "mysql", "module:name"])
def test_a_url_of_no_ledger_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"interchange_server\.store: there is no store '{url}'; use sqlite"
    ):
        open_ledger(url, tmp_path)


async def test_a_file_that_cannot_be_read_is_refused(ledger: SqliteLedger, tmp_path: Path) -> None:
    """One of another version, one that was cut, and one that is no database."""
    path = tmp_path / LEDGER_FILE
    await ledger.commit(episode(number, digest=bytes(1000)) for number in range(1, 500))
    await ledger.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match=f"has version 99, this tinkerscript reads {LEDGER_VERSION}"):
        SqliteLedger(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {LEDGER_VERSION}")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(StoreError, match=rf"{LEDGER_FILE}: database disk image is malformed"):
        await SqliteLedger(path).read("SELECT sum(length(digest)) FROM {s}episodes")
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match=r"other\.sqlite: file is not a database"):
        SqliteLedger(other)


async def test_a_new_ledger_has_the_mark_of_its_run(tmp_path: Path) -> None:
    (tmp_path / RUN_ID).write_text("0123456789abcdef" * 2)
    await SqliteLedger(tmp_path / LEDGER_FILE).close()
    assert not is_foreign(tmp_path / LEDGER_FILE, "0123456789abcdef" * 2)
    assert is_foreign(tmp_path / LEDGER_FILE, "fedcba9876543210" * 2)


@pytest.mark.parametrize(("durability", "synchronous"), [("normal", 1), ("full", 2)])
async def test_full_durability_is_synced(tmp_path: Path, durability: Durability, synchronous: int) -> None:
    """SQLite's numbers: 1 is NORMAL, 2 is FULL. The pragma belongs to the connection that writes."""
    ledger = SqliteLedger(tmp_path / LEDGER_FILE, durability=durability)
    written = ledger._connection.execute("PRAGMA synchronous")  # pyright: ignore[reportPrivateUsage]
    assert written.fetchone() == (synchronous,)
    await ledger.close()


@pytest.mark.parametrize(("number", "size", "is_long"), [(5, 100, False), (1200, 1, True), (5, 2**20, True)])
async def test_a_long_transaction_has_a_thread(tmp_path: Path, number: int, size: int, is_long: bool) -> None:
    threads = list[int]()

    class Watched(SqliteLedger):
        def _write(self, batch: WriteBatch) -> None:
            threads.append(threading.get_ident())
            super()._write(batch)

    ledger = Watched(tmp_path / LEDGER_FILE)
    await ledger.commit(made(SampleRow, each, payload=bytes(size)) for each in range(number))
    await ledger.close()
    assert [thread != threading.get_ident() for thread in threads] == [is_long]


@pytest.mark.parametrize(("limit", "lengths"), [(2**22, [1, 2, 3, 4] * 3), (2**30, [*range(1, 13)])])
async def test_the_ledger_moves_the_log_into_the_file_whenever_it_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, lengths: list[int]
) -> None:
    """More than 4 MiB, and then it begins anew. SQLite itself would move it on the event loop."""
    if limit == 2**30:
        monkeypatch.setattr("tinkerscript.ledger.sqlite.LOG_BYTES", limit)
    path, found = tmp_path / LEDGER_FILE, list[int]()
    ledger = SqliteLedger(path)
    for number in range(12):
        await ledger.commit([made(SampleRow, number, payload=bytes(2**20))])
        found.append(Path(f"{path}-wal").stat().st_size >> 20)
    assert found == lengths
    await ledger.close()


async def test_a_log_that_cannot_be_moved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / LEDGER_FILE
    monkeypatch.setattr("tinkerscript.ledger.sqlite.LOG_BYTES", 0)
    ledger = SqliteLedger(path)
    path.rename(tmp_path / "elsewhere.sqlite")
    path.mkdir()
    with pytest.raises(StoreError, match=rf"ledger .*{LEDGER_FILE}: unable to open"):
        await ledger.commit([episode()])
    await ledger.close()


@pytest.mark.parametrize(("durability", "number"), [((), 0), (("normal",), 0), (("full",), 1)])
async def test_closing_leaves_nothing(
    tmp_path: Path, durability: tuple[Durability, ...], number: int
) -> None:
    ledger = open_ledger("sqlite", tmp_path, *durability)
    await ledger.commit([episode()])
    writers = [thread for thread in threading.enumerate() if thread.name.startswith("ledger-writer")]
    assert len(writers) == number
    await ledger.close()
    assert not any(writer.is_alive() for writer in writers)
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER_FILE], "nor another file"


# Transactions


def watched(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of writes in each transaction, from now on."""
    write, counts = ledger.write, list[int]()

    async def noted(batch: WriteBatch) -> None:
        counts.append(batch.count)
        await write(batch)

    monkeypatch.setattr(ledger, "write", noted)
    return counts


@pytest.mark.parametrize(
    ("number", "size", "counts"),
    [(63, 1, [64]), (64, 1, [64, 1]), (1, 2**18 - 1, [2]), (1, 2**18, [1, 1])],
)
async def test_what_is_much_waits_for_no_more(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch, number: int, size: int, counts: list[int]
) -> None:
    found = watched(ledger, monkeypatch)
    ledger.note(made(SampleRow, each, payload=bytes(size)) for each in range(number))
    await asyncio.sleep(0)
    await ledger.commit([episode()])
    assert found == counts


async def test_steady_writes_hold_up_none(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(ledger, monkeypatch)
    for number in range(20):
        ledger.put(episode(number))
        await asyncio.sleep(0)
    assert found[:2] == [9, 9], "of so many iterations of the event loop"


async def test_rows_and_statements_go_together(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watched(ledger, monkeypatch)
    ledger.put(episode())
    ledger.execute("UPDATE {s}episodes SET pool = 'p'")
    await ledger.durable()
    assert (found, await ledger.read("SELECT pool FROM {s}episodes")) == ([2], [("p",)])


async def test_a_transaction_that_failed_holds_no_lock(ledger: SqliteLedger, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        await ledger.commit([made(TrainedRow, 1)])
    other = SqliteLedger(tmp_path / LEDGER_FILE)
    await other.commit([episode()])
    await other.close()


@pytest.mark.parametrize(
    ("kind", "is_synced"), [(PublicationRow, True), (StepRow, True), (EpisodeRow, False)]
)
async def test_what_must_not_happen_again_is_in_the_file_at_once(
    ledger: SqliteLedger, tmp_path: Path, kind: type[Row], is_synced: bool
) -> None:
    """Not only in the log, which a power failure can cut."""
    await ledger.commit([made(StepRow, 1)])
    await ledger.commit([made(kind, 2)])
    without_log = tmp_path / "copy.sqlite"
    shutil.copy(tmp_path / LEDGER_FILE, without_log)
    query = f"SELECT count(*) FROM {kind.TABLE} WHERE {kind.KEY[0]} = 2"
    with closing(sqlite3.connect(without_log)) as connection:
        assert connection.execute(query).fetchone() == (int(is_synced),)


async def test_many_calls_are_read_on_a_thread(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [make_call(None, [1], [2], messages=random.Random(n).randbytes(2**20).hex()) for n in range(10)]
    few = [make_call(None, [number], [number]) for number in range(3)]
    ledger.put(episode(1))
    for attempt, calls in enumerate((many, few)):
        for each in calls:
            ledger.put_call(1, attempt, each)
    await ledger.durable()
    read, beside = ledger.read, list[str]()

    async def noted(sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        beside.append(sql)
        return await read(sql, parameters)

    monkeypatch.setattr(ledger, "read", noted)
    assert (await ledger.calls([(1, 1), (1, 2)]), beside) == ([few, []], [])
    assert (await ledger.calls([(1, 0), (1, 2)]), len(beside)) == ([many, []], 2)


async def test_bytes_that_were_put_are_counted(ledger: SqliteLedger) -> None:
    assert ledger.bytes_put == 0
    ledger.note([made(SampleRow, 1, payload=b"12345"), made(ImageRow, 1, file=b"123"), episode()])
    assert ledger.bytes_put == 8
    await ledger.durable()
    ledger.note([made(SampleRow, 1, payload=b"12345")])
    assert ledger.bytes_put == 13


# Tables


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.TABLE)
def test_what_a_row_does_not_say_is_nothing(kind: type[Row]) -> None:
    nothing: dict[type, object] = {int: 0, float: 0.0, str: "", bytes: b"{}"}
    more = {"position": -1, "place": -1, "count": 1}
    for field in msgspec.structs.fields(kind):
        if not field.required:
            of, may_be_null = column_types(kind)[field.name]
            expected = more.get(field.name, None if may_be_null else nothing[of])
            assert field.default in (expected, b"" if of is bytes else expected), field.name


def test_what_is_large_counts() -> None:
    sizes = {kind: made(kind, 1).size for kind in TABLES}
    counted = (SampleRow, CallRow, ImageRow, ResultRow, TranscriptRow, TokensRow)
    assert sizes == dict.fromkeys(TABLES, 0) | dict.fromkeys(counted, len(ANY_BYTES) + 1)


def test_a_call_s_row_has_values_of_its_columns_types() -> None:
    """SQLite would store 3.0 as 3; PostgreSQL would not."""
    row = call_row(1, 2, make_call(None, [1, 2], [3, 4, 5]))
    found = {name: type(value) for name, value in msgspec.structs.asdict(row).items()}
    assert found == {name: of for name, (of, _) in column_types(CallRow).items()}


def test_outcomes_and_uses_of_tokens_are_stored_by_these_names_and_numbers() -> None:
    outcomes = {name: value for name, value in vars(Use).items() if name.isupper()}
    assert outcomes == {name: name.lower() for name in outcomes}
    assert len(outcomes) == 10
    assert [(use.name, use.value) for use in TokenUse] == [
        *(("TRAINED", 0), ("CONSTRAINED", 1), ("CORRECTED", 2), ("LEFT_OUT", 3)),
    ]


def test_both_databases_have_the_same_tables() -> None:
    names = {
        "bigint GENERATED ALWAYS AS IDENTITY": "INTEGER",
        "bigint": "INTEGER",
        "double precision": "REAL",
        'text COLLATE "C"': "TEXT",
        "bytea": "BLOB",
    }
    translated = create_statements(postgres=True)
    for name, other in names.items():
        translated = [each.replace(name, other) for each in translated]
    assert translated == [each.removesuffix(" WITHOUT ROWID") for each in create_statements()]


def test_a_composite_key_is_stored_once_where_rows_are_small() -> None:
    once = [each.split()[2] for each in create_statements() if each.endswith("WITHOUT ROWID")]
    kinds = (AttemptRow, StepRow, TrainedRow, MetricRow)
    assert once == [f"{{s}}{kind.TABLE}" for kind in kinds]


async def test_a_later_row_does_not_change_what_is_fixed(ledger: SqliteLedger) -> None:
    await ledger.commit([episode(1, uuid="u", state="claimed")])
    await ledger.commit([episode(1, uuid="other", state="ended")])
    assert await ledger.read("SELECT uuid, state FROM {s}episodes") == [("u", "ended")]
