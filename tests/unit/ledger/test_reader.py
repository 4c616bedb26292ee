"""A run's ledger as people read it: from its folder, while the run goes on and after it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import threading
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rollout_helpers import make_call
from run_ledger import claim, ended_episode
from tinkerscript.errors import ConfigError, NotRecordedError, StoreError
from tinkerscript.files import CONFIG_FILE, LEDGER_FILE, RUN_ID
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.reader import STATUS, STORE_VARIABLE, LedgerReader, find_runs, is_run
from tinkerscript.ledger.reading import SqliteReading, plain
from tinkerscript.ledger.rows import LEDGER_VERSION, TABLES, FactRow, TokensRow, TranscriptRow
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence, packed_sequences


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has no ledger yet."""
    (tmp_path / CONFIG_FILE).write_text("seed: 1\nengine:\n  model: tiny\n")
    return tmp_path


async def test_a_run_without_a_ledger_has_nothing_to_read_until_there_is_one(folder: Path) -> None:
    reader = LedgerReader(folder)
    assert [reader.number(f"SELECT count(*) FROM {kind.TABLE}") for kind in TABLES] == [0] * len(TABLES)
    assert (reader.status(), reader.row("SELECT * FROM episodes")) == ({}, None)
    assert not (folder / LEDGER_FILE).exists()
    (folder / LEDGER_FILE).touch()
    assert reader.status() == {}, "as its server makes it"
    ledger = SqliteLedger(folder / LEDGER_FILE)
    await ledger.commit([ended_episode(3), FactRow(name=STATUS, value=b'{"state": "running"}')])
    assert reader.number("SELECT sequence FROM episodes") == 3
    assert reader.status() == {"state": "running"}
    await ledger.close()
    reader.close()


def test_supervised_fine_tuning_has_its_ledger_in_its_folder(folder: Path) -> None:
    config = {"method": "sft", "interchange_server": {"store": "postgresql://nowhere/runs"}}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    assert LedgerReader(folder, store="postgresql://nowhere/runs").rows("SELECT * FROM steps") == []


async def test_a_reader_connects_again_until_there_is_a_ledger(ledger: SqliteLedger, folder: Path) -> None:
    found = [SqliteReading(path) for path in (None, folder / "none.sqlite", folder / LEDGER_FILE)]
    assert [each.is_there for each in found] == [False, False, True]
    assert [each.rows("SELECT * FROM episodes", ()) for each in found] == [[], [], []]
    for each in found:
        each.close()


async def test_rows_have_named_columns(ledger: SqliteLedger, folder: Path) -> None:
    await ledger.commit(ended_episode(number, reward=number / 2) for number in (1, 2))
    reader = LedgerReader(folder)
    query = "SELECT sequence, reward AS gained FROM episodes WHERE sequence > ? ORDER BY sequence"
    first, second = reader.rows(query, [0])
    assert (first, first[0], first["gained"]) == ((1, 0.5), 1, 0.5)
    assert (first.keys(), dict(second)) == (("sequence", "gained"), {"sequence": 2, "gained": 1.0})
    assert reader.row(query, [1]) == second
    assert (reader.row(query, [2]), reader.number(query, [2])) == (None, None)
    with pytest.raises(ValueError, match="not in tuple"):
        first["reward"]
    reader.close()


async def test_what_an_episode_left_is_read_by_attempt_and_step(ledger: SqliteLedger, folder: Path) -> None:
    calls = [make_call(None, [1], [2, 3]), make_call(None, [1], [4])]
    ledger.note([ended_episode(1), claim(1, 1), claim(1, 2)])
    ledger.note(
        TranscriptRow(episode=1, attempt=attempt, transcript=text)
        for attempt, text in ((2, b"the second \xff"), (1, b"the first"), (3, b""))
    )
    ledger.put_call(1, 1, make_call(None, [9], [9]))
    for call in calls:
        ledger.put_call(1, 2, call)
    sequences = {
        (2, "judge", 0): TrainedSequence(number=0, role="judge"),
        (2, "", 0): TrainedSequence(number=0, uses=bytes([TokenUse.TRAINED])),
        (1, "", 0): TrainedSequence(number=1, reason="late"),
        (3, "", 2): TrainedSequence(number=0),
    }
    ledger.note(
        TokensRow(episode=1, step=step, role=role, sequences=packed_sequences([each]), undone=undone)
        for (step, role, undone), each in sequences.items()
    )
    await ledger.commit([TokensRow(episode=1, step=4, sequences=b"")])
    reader = LedgerReader(folder)
    assert (reader.calls(1, 2), reader.calls(1, 3)) == (calls, [])
    assert reader.transcribed(1) == [1, 2]
    assert (reader.transcript(1, 2), reader.transcript(1, 4)) == (b"the second \xff", b"")
    assert reader.sequences(1) == {
        1: [sequences[1, "", 0]],
        2: [sequences[2, "", 0], sequences[2, "judge", 0]],
    }, "not those of steps that are undone, or whose tokens were dropped"
    ledger.execute("UPDATE {s}calls SET call = ?", b"")
    await ledger.durable()
    assert reader.calls(1, 2) == []
    reader.close()
    assert reader.transcribed(1) == [1, 2], "it may be used again"
    reader.close()


async def test_each_thread_has_a_connection(ledger: SqliteLedger, folder: Path) -> None:
    await ledger.commit([ended_episode(5)])
    reader, found = LedgerReader(folder), list[Any]()

    def read() -> None:
        found.append(reader.number("SELECT sequence FROM episodes"))
        reader.close()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5] * 3
    reader.close()


async def test_a_reader_cannot_write(ledger: SqliteLedger, folder: Path) -> None:
    await ledger.commit([ended_episode(1)])
    reader = LedgerReader(folder)
    with pytest.raises(StoreError, match="readonly"):
        reader.rows("DELETE FROM episodes")
    assert reader.number("SELECT count(*) FROM episodes") == 1
    reader.close()


async def test_a_ledger_that_a_reader_has_open_can_be_copied_by_itself_too(folder: Path) -> None:
    ledger = SqliteLedger(folder / LEDGER_FILE)
    await ledger.commit([ended_episode(1)])
    reader = LedgerReader(folder)
    await ledger.close()
    copy = folder / "copy"
    copy.mkdir()
    for name in (LEDGER_FILE, CONFIG_FILE):
        shutil.copy(folder / name, copy)
    assert LedgerReader(copy).number("SELECT count(*) FROM episodes") == 1
    reader.close()


@pytest.mark.parametrize(("may_write", "more"), [(True, {"-shm", "-wal"}), (False, set[str]())])
async def test_reading_in_a_folder_that_may_not_be_written_makes_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, may_write: bool, more: set[str]
) -> None:
    ledger = SqliteLedger(folder / LEDGER_FILE)
    await ledger.commit([ended_episode(1)])
    await ledger.close()

    def access(path: Path, mode: int) -> bool:
        return may_write or (path, mode) != (folder, os.W_OK)

    monkeypatch.setattr(os, "access", access)
    reader = LedgerReader(folder)
    assert reader.number("SELECT count(*) FROM episodes") == 1
    names = {LEDGER_FILE, CONFIG_FILE, *(f"{LEDGER_FILE}{end}" for end in more)}
    assert {path.name for path in folder.iterdir()} == names
    reader.close()


def test_values_of_another_database_become_those_of_sqlite() -> None:
    given = (Decimal(3), Decimal("3.5"), memoryview(b"ab"), b"ab", "ab", 2.0, None)
    expected = (3, 3.5, b"ab", b"ab", "ab", 2.0, None)
    found = tuple(map(plain, given))
    assert (found, [*map(type, found)]) == (expected, [*map(type, expected)])


# What cannot be read


def test_a_ledger_of_another_version_is_refused(folder: Path) -> None:
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match=f"has version 99, and this tinkerscript reads {LEDGER_VERSION}"):
        LedgerReader(folder)


def test_a_file_that_is_no_database_is_refused(folder: Path) -> None:
    (folder / LEDGER_FILE).write_bytes(b"this is not a database" * 100)
    with pytest.raises(ConfigError, match=rf"{LEDGER_FILE}: file is not a database. It is damaged"):
        LedgerReader(folder)


def test_a_query_that_fails_names_the_ledger(folder: Path) -> None:
    reader = LedgerReader(folder)
    with pytest.raises(StoreError, match=rf"ledger .*{LEDGER_FILE}: no such table: unknown$"):
        reader.rows("SELECT * FROM unknown")
    reader.close()


def test_a_query_after_the_end_names_the_ledger_too(folder: Path) -> None:
    reading = SqliteReading(folder / LEDGER_FILE)
    reading.close()
    with pytest.raises(StoreError, match=rf"ledger .*{LEDGER_FILE}: Cannot operate on a closed database"):
        reading.rows("SELECT 1", ())


async def test_tokens_that_no_trainer_wrote_are_refused(ledger: SqliteLedger, folder: Path) -> None:
    await ledger.commit([ended_episode(1), TokensRow(episode=1, step=1, sequences=b"no tokens")])
    reader = LedgerReader(folder)
    with pytest.raises(NotRecordedError, match="something else than tokens: not the tokens of an episode"):
        reader.sequences(1)
    reader.close()


# Where it is


async def test_a_ledger_elsewhere_is_read_if_the_user_names_it(
    ledger: SqliteLedger, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder from elsewhere could name any file or database."""
    await ledger.commit([ended_episode(5)])
    store, copy = f"sqlite://{folder / LEDGER_FILE}", folder / "copy"
    copy.mkdir()
    (copy / CONFIG_FILE).write_text(json.dumps({"interchange_server": {"store": store}}))
    for named in ("", f"{store}.other"):
        monkeypatch.setenv(STORE_VARIABLE, named)
        with pytest.raises(ConfigError, match=f"config.yaml names the ledger {store}, .*{STORE_VARIABLE}"):
            LedgerReader(copy)
    readers = [LedgerReader(copy, store=store)]
    monkeypatch.setenv(STORE_VARIABLE, store)
    readers.append(LedgerReader(copy))
    monkeypatch.delenv(STORE_VARIABLE)
    readers += [LedgerReader(folder), LedgerReader(folder, store="sqlite")]
    assert [each.number("SELECT sequence FROM episodes") for each in readers] == [5] * 4
    for each in readers:
        each.close()


def test_a_ledger_that_is_not_read_is_named_without_its_password(folder: Path) -> None:
    store = "postgresql://me:secret@host/runs"
    (folder / CONFIG_FILE).write_text(json.dumps({"interchange_server": {"store": store}}))
    with pytest.raises(ConfigError, match="names the ledger host/runs, ") as told:
        LedgerReader(folder)
    assert "secret" not in str(told.value)


def test_a_ledger_in_postgresql_needs_its_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tinkerscript.ledger.postgres_reader", None)
    with pytest.raises(ConfigError, match=r"needs psycopg .*pip install 'tinkerscript\[postgres\]'"):
        LedgerReader(folder, store="postgres://host/runs")


# The config


def test_the_config_is_the_one_that_a_resumption_wrote(folder: Path) -> None:
    def write(text: str, *, time: int) -> None:
        (folder / CONFIG_FILE).write_text(text)
        os.utime(folder / CONFIG_FILE, (time, time))

    reader = LedgerReader(folder)
    assert (reader.model(), reader.setting("engine", "backend")) == ("tiny", None)
    write("engine: {model: larger, backend: tinker}\n", time=1)
    assert (reader.model(), reader.setting("engine", "backend")) == ("larger", "tinker")
    assert reader.setting("training", "steps") is None
    write("engine: none\n", time=2)
    assert (reader.model(), reader.config) == ("", {"engine": "none"})
    reader.close()


def test_a_config_is_read_without_a_time_of_its_own_and_not_beyond_a_mebibyte(folder: Path) -> None:
    """Some archives set all times to the first."""
    for time in (0, 1):
        os.utime(folder / CONFIG_FILE, ns=(time, time))
        assert LedgerReader(folder).model() == "tiny"
    (folder / CONFIG_FILE).write_text("#" * (2**20 - 8) + "\nseed: 12")
    assert LedgerReader(folder).config == {"seed": 1}


def test_a_folder_whose_config_says_nothing_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is not the folder of a run"):
        LedgerReader(tmp_path)
    for text in (b"[1, 2]", b"a: [", b"\xff\xfe", b""):
        (tmp_path / CONFIG_FILE).write_bytes(text)
        with pytest.raises(ConfigError, match=CONFIG_FILE):
            LedgerReader(tmp_path)


# Folders


def test_runs_are_found_by_their_identity(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run, and has none in it"):
        find_runs(tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RUN_ID).write_text("0")
    (tmp_path / "other").mkdir()
    (tmp_path / "latest").symlink_to("b")
    assert find_runs(tmp_path) == {"a": tmp_path / "a", "b": tmp_path / "b"}
    assert find_runs(tmp_path / "latest") == {"b": tmp_path / "b"}
    assert [is_run(tmp_path / name) for name in ("a", "other")] == [True, False]
