"""A run's ledger as people read it: from its folder, while the run goes on and after it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rollout_helpers import make_call
from run_ledger import claim, ended_episode
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.files import CONFIG_FILE, LEDGER_FILE, RUN_ID
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.reader import STATUS, LedgerReader, find_runs, is_run
from tinkerscript.ledger.rows import LEDGER_VERSION, TABLES, FactRow, TokensRow, TranscriptRow
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence, packed_sequences


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has no ledger yet."""
    (tmp_path / CONFIG_FILE).write_text("seed: 1\nengine:\n  model: tiny\n")
    return tmp_path


@pytest.fixture
async def ledger(folder: Path) -> AsyncIterator[SqliteLedger]:
    ledger = SqliteLedger(folder / LEDGER_FILE)
    yield ledger
    await ledger.close()


async def test_a_run_without_a_ledger_has_nothing_to_read_until_there_is_one(folder: Path) -> None:
    reader = LedgerReader(folder)
    assert {kind: reader.number(f"SELECT count(*) FROM {kind.TABLE}") for kind in TABLES} == dict.fromkeys(
        TABLES, 0
    )
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


async def test_rows_have_named_columns(ledger: SqliteLedger, folder: Path) -> None:
    await ledger.commit(ended_episode(number, reward=number / 2) for number in (1, 2))
    reader = LedgerReader(folder)
    query = "SELECT sequence, reward AS gained FROM episodes WHERE sequence > ? ORDER BY sequence"
    first, second = reader.rows(query, [0])
    assert (first, first[0], first["gained"]) == ((1, 0.5), 1, 0.5)
    assert dict(second) == {"sequence": 2, "gained": 1.0}
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


async def test_the_ledger_of_a_run_that_is_over_can_be_copied_by_itself(folder: Path) -> None:
    ledger = SqliteLedger(folder / LEDGER_FILE)
    await ledger.commit([ended_episode(1)])
    await ledger.close()
    copy = folder / "copy"
    copy.mkdir()
    for name in (LEDGER_FILE, CONFIG_FILE):
        shutil.copy(folder / name, copy)
    reader = LedgerReader(copy)
    assert reader.number("SELECT count(*) FROM episodes") == 1
    reader.close()


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
    with pytest.raises(StoreError, match=rf"ledger .*{LEDGER_FILE}: no such table: unknown"):
        reader.rows("SELECT * FROM unknown")
    reader.close()


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


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", b"\xff\xfe", ""])
def test_a_folder_whose_config_says_nothing_is_no_run(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=CONFIG_FILE):
        LedgerReader(tmp_path)


def test_a_folder_without_a_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} is not the folder of a run"):
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
