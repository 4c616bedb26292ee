"""A server and the record of a trainer elsewhere: a real link, a real child, and senders that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from interchange_helpers import FAST, run_config, trainer, until
from record_helpers import episode, mirrored_rows
from tinkerscript.config import RunConfig, dump_config
from tinkerscript.errors import ConfigError
from tinkerscript.record.reader import Record
from tinkerscript.record.rows import NoteRow, RowBatch, pack_batch
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.server import mirror_process
from tinkerscript.server.process import running_server
from tinkerscript.train.record_sender import RecordSender
from tinkerscript.train.recorder import RunRecorder
from tinkerscript.trainer_link.messages import OfferRecord, PartTaken, RecordPart, RecordState
from tinkerscript.trainer_link.trainer_end import TrainerLink


@dataclass
class Ends:
    """A server, and a trainer with a link to it."""

    url: str
    link: TrainerLink
    server: Path
    trainer: Path

    def children(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if "mirror" in child.cmdline() and str(self.server) in child.cmdline()
        ]

    @asynccontextmanager
    async def sending(self, writer: RecordWriter, folder: Path | None = None) -> AsyncIterator[list[str]]:
        """A sender at work; gives what it notes."""
        notes: list[str] = []
        path = (folder or self.trainer) / RECORD_FILE
        sender = RecordSender(
            self.link, RunRecorder(writer, "all"), path, limit_mb=0, note=notes.append, look_every_s=0.02
        )
        task = asyncio.create_task(sender.run())
        yield notes
        sender.finishing.set()
        async with asyncio.timeout(60):
            await task

    def sees(self, query: str, value: object) -> bool:
        try:
            with closing(Record(self.server)) as record:
                return record.number(query) == value
        except ConfigError:  # It is not there yet.
            return False


@pytest.fixture
async def ends(tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Ends]:
    monkeypatch.setattr(mirror_process, "PAUSE_S", 0.05)
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-judge-51c2")
    judge = {"kind": "outside", "base_url": "http://127.0.0.1:9/v1", "api_key_env": "JUDGE_KEY"}
    data = run_config(byte_model, interchange_method="tcp").model_dump()
    config = RunConfig.model_validate(data | {"roles": {"judge": judge}})
    server, here = tmp_path / "server", tmp_path / "trainer"
    server.mkdir()
    here.mkdir()
    (server / "config.yaml").write_text(dump_config(config))
    async with (
        running_server(config, server, environ=dict(os.environ), times=FAST) as (info, _),
        trainer(info.link_address) as link,
    ):
        await link.flush()
        yield Ends(info.url, link, server, here)


@pytest.fixture
def writer(ends: Ends) -> Any:
    with RecordWriter(ends.trainer / RECORD_FILE) as writer:
        writer.resume(0)
        yield writer


async def test_what_is_recorded_is_seen_at_the_server_at_once(ends: Ends, writer: RecordWriter) -> None:
    async with ends.sending(writer) as notes:
        for number in range(1, 4):
            writer.episode(episode(f"e{number}"))
            writer.status(step=number, state="running", steps=9)
            await until(lambda n=number: ends.sees("SELECT max(number) FROM episodes", n), "the episode")
        (child,) = ends.children()
        assert "PATH" in child.environ()
        assert "JUDGE_KEY" not in child.environ()
        async with httpx.AsyncClient(base_url=ends.url, timeout=60) as http:
            runs = (await http.get("/api/runs")).json()
        assert json.dumps(runs).count('"state": "running"') == 1
    assert notes == []
    assert mirrored_rows(ends.server) == mirrored_rows(ends.trainer)


async def test_a_trainer_that_shares_the_folder_sends_nothing(ends: Ends) -> None:
    with RecordWriter(ends.server / RECORD_FILE) as writer:
        writer.resume(0)
        async with ends.sending(writer, ends.server) as notes:
            pass
        writer.episode(episode("e1"))
    assert notes == []
    assert ends.children() == []
    assert Record(ends.server).heard() is None


async def test_a_child_that_is_killed_is_replaced_and_loses_nothing(ends: Ends, writer: RecordWriter) -> None:
    async with ends.sending(writer) as notes:
        writer.episode(episode("e1"))
        await until(lambda: ends.sees("SELECT max(number) FROM episodes", 1), "the first episode")
        (child,) = ends.children()
        child.send_signal(signal.SIGKILL)
        for number in range(2, 30):
            writer.episode(episode(f"e{number}", detail={"chat": os.urandom(40_000)}))
        await until(lambda: ends.sees("SELECT count(*) FROM episodes", 29), "all episodes")
    assert notes == []
    assert mirrored_rows(ends.server) == mirrored_rows(ends.trainer)


async def test_the_record_of_another_run_is_kept_and_the_trainer_says_so(
    ends: Ends, writer: RecordWriter
) -> None:
    with RecordWriter(ends.server / RECORD_FILE) as other:
        other.resume(0)
        other.note("theirs")
    before = mirrored_rows(ends.server)
    async with ends.sending(writer) as notes:
        writer.episode(episode("e1"))
        await until(lambda: bool(notes), "a note")
    (note,) = notes
    assert note.startswith("the server's page does not follow this run: ")
    assert note.endswith("is the record of another run; move it away to see this run there")
    assert mirrored_rows(ends.server) == before


def part(number: int, data: bytes, *, batch: int = 1, last: bool = True, session: str = "s") -> RecordPart:
    return RecordPart(session=session, batch=batch, part=number, is_last=last, data=data)


async def test_a_hostile_trainer_writes_nothing_and_stops_nothing(ends: Ends) -> None:
    """It may break its own mirror, and no more."""
    link = ends.link
    offer = OfferRecord(session="s", identity="../../x", limit_mb=0)
    good = pack_batch(RowBatch(notes=[NoteRow(1, 0.0, "'; DROP TABLE notes; --")]))

    async def asked(question: OfferRecord | RecordPart) -> RecordState:
        answer = await link.ask_about_record(question)
        assert isinstance(answer, RecordState)
        return answer

    unoffered = await asked(part(0, good))
    assert (unoffered.problem, unoffered.marks) == ("", b""), "it is to be offered first"
    hostile = (
        (part(0, b"garbage"), "not a packed"),
        (part(3, b"x"), "part 3 is not the next one"),
        (part(0, pack_batch(RowBatch(facts={"state": "1"}))), "contents that a record cannot have"),
    )
    for question, why in hostile:
        assert (await asked(offer)).problem == ""
        assert why in (await asked(question)).problem
    assert (await asked(offer)).problem == ""
    half = len(good) // 2
    taken = await link.ask_about_record(part(0, good[:half], last=False))
    assert isinstance(taken, PartTaken)
    assert (await asked(part(1, good[half:]))).problem == ""
    with closing(Record(ends.server)) as record:
        assert [tuple(row) for row in record.rows("SELECT text FROM notes")] == [("'; DROP TABLE notes; --",)]
    other = await asked(OfferRecord(session="s", identity="i", limit_mb=0))
    assert other.problem == "", "an empty mirror is anybody's"
    link._outbox.put(part(0, b"x" * (mirror_process.MAX_PART_BYTES + 1)))
    for _ in range(50):
        link._outbox.put(part(0, good, session="flood"))
    await link.flush()
    async with httpx.AsyncClient(base_url=ends.url) as http:
        metrics = (await http.get("/metrics")).text
    assert 'link_drops_total{reason="record"}' in metrics
    assert {path.name for path in ends.server.parent.iterdir()} == {"server", "trainer"}
