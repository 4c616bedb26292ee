"""What a run does now, and what it told people, as its ledger has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest

from interchange_helpers import until
from run_ledger import KeptRows
from tinkerscript.dashboard.progress import PendingEvaluation
from tinkerscript.errors import LinkError
from tinkerscript.files import CONFIG_FILE, LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import FactRow, TrainerRow
from tinkerscript.lifecycle import ProcessId
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run_status import RunStatus


@pytest.fixture
def shown() -> QuietReporter:
    return QuietReporter()


@pytest.fixture
def status(shown: QuietReporter, monkeypatch: pytest.MonkeyPatch) -> RunStatus:
    """One that says each change at once."""
    monkeypatch.setattr("tinkerscript.train.run_status.SAID_EVERY_S", 0.0)
    return RunStatus(shown)


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    (tmp_path / CONFIG_FILE).write_text("seed: 1\n")
    ledger = SqliteLedger(tmp_path / LEDGER_FILE)
    yield ledger
    await ledger.close()


def notes(reader: LedgerReader) -> list[str]:
    return [text for (text,) in reader.rows("SELECT text FROM notes ORDER BY number")]


async def says(reader: LedgerReader, **values: Any) -> None:
    """Return once the ledger says so."""
    await until(lambda: values.items() <= reader.status().items(), f"{values} in {reader.status()}")


async def test_what_a_run_shows_is_in_its_ledger_once_there_is_one(
    status: RunStatus, shown: QuietReporter, ledger: SqliteLedger, tmp_path: Path
) -> None:
    reader = LedgerReader(tmp_path)
    status.begin(7, done=2)
    status.note("before")
    with status.waiting("outer"):
        assert (reader.status(), notes(reader)) == ({}, [])
        status.write_into(ledger)
        await says(reader, state="running", steps=7, step=2, waiting_for="outer")
        with status.waiting("inner"):
            await says(reader, waiting_for="inner")
        await says(reader, waiting_for="outer")
    await says(reader, waiting_for="", phase=None)
    with status.phase("step 3", total=4) as phase:
        phase.advance(3)
        await until(lambda: (reader.status()["phase"] or {}).get("done") == 3)
        said = reader.status()["phase"]
        assert (said["label"], said["total"]) == ("step 3", 4)
    await says(reader, phase=None)
    status.pending([PendingEvaluation("step-2", 2, 3, 8)])
    await says(reader, pending=[{"label": "step-2", "step": 2, "done": 3, "total": 8}])
    status.pending([])
    await says(reader, pending=[])
    status.note("hello")
    status.step(3, {"a": 1.0})
    status.evaluation("after", 0.5, 4, 0)
    await status.end(None)
    assert notes(reader) == ["before", "hello"]
    found = reader.status()
    assert (found["state"], found["step"], found["failure"]) == ("finished", 3, "")
    assert ProcessId(*found["process"]) == ProcessId.own()
    assert (shown.notes, shown.waits, shown.episodes) == (["before", "hello"], ["outer", "inner"], 3)
    assert (shown.steps, shown.scores) == ([{"a": 1.0}], {"after": 0.5})
    status.note("too late")
    await status.end(ValueError("too late"))
    await ledger.durable()
    assert (reader.status(), notes(reader)) == (found, ["before", "hello"])
    reader.close()


@pytest.mark.parametrize(
    ("error", "state", "failure"),
    [
        (None, "finished", ""),
        (ValueError("no"), "failed", "ValueError: no"),
        (asyncio.CancelledError(), "stopped", ""),
        (KeyboardInterrupt(), "stopped", ""),
    ],
)
async def test_how_a_run_ends_is_its_last_word(
    error: BaseException | None, state: str, failure: str, status: RunStatus
) -> None:
    ledger = KeptRows()
    status.write_into(ledger)
    await status.exited(type(error) if error else None, error, None)
    said = json.loads(ledger.of(FactRow)[-1].value)
    assert (said["state"], said["failure"]) == (state, failure)


class Failing(KeptRows):
    """A ledger that is gone."""

    async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
        raise LinkError("the server is gone")


async def test_a_ledger_that_fails_does_not_stop_what_only_looks_on(
    status: RunStatus, shown: QuietReporter, caplog: pytest.LogCaptureFixture
) -> None:
    status.write_into(Failing())
    await until(lambda: "status.not_written the server is gone" in caplog.text)
    status.step(1, {"a": 1.0})
    await status.end(None)
    assert shown.steps == [{"a": 1.0}]


async def test_the_end_of_a_run_waits_for_its_ledger_for_a_while(
    status: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(KeptRows):
        async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
            self.note(rows)
            await asyncio.Event().wait()

    monkeypatch.setattr("tinkerscript.train.run_status.LAST_WORDS_S", 0.01)
    stuck = Stuck()
    status.write_into(stuck)
    async with asyncio.timeout(20):
        await status.end(None)
    assert b'"finished"' in stuck.of(FactRow)[-1].value


async def test_a_run_without_a_ledger_ends_without_a_word(status: RunStatus, shown: QuietReporter) -> None:
    status.note("the model is not there")
    await status.end(ValueError("no model"))
    assert shown.notes == ["the model is not there"]
