"""A run's record: what is written can be read, stays within its limit, and never stops the run."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zstandard

from record_helpers import episode, said, trained_sequence
from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.record import schema as schema_module
from tinkerscript.record import writer as writer_module
from tinkerscript.record.entries import EpisodeDetail, TrainedEpisode, packed, unpacked
from tinkerscript.record.reader import Record
from tinkerscript.record.schema import RECORD_FILE, RECORD_VERSION
from tinkerscript.record.writer import RecordWriter, checkpoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / RECORD_FILE


@pytest.fixture
def writer(path: Path) -> Iterator[RecordWriter]:
    with RecordWriter(path) as writer:
        yield writer
        assert writer.failure == ""


def columns(record: Record, query: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in record.rows(query)]


def rewrite(path: Path, *statements: str) -> None:
    """Change the file behind the writer's back."""
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


# What is written can be read


def test_an_episode_has_a_row_its_calls_and_its_words(writer: RecordWriter, path: Path) -> None:
    first = said(None, [1, 2, 3], [4, 5], "Sum?", "one", policy_version=3, created=50)
    last = said(
        first,
        [6],
        [7],
        "Again?",
        "the  last\nreply",
        policy_version=4,
        policy_version_end=6,
        stop_reason="length",
    )
    detail = {
        "calls": [first, last],
        "metadata": {"scores": {"exact": 1, "note": "x"}},
        "log_metrics": {"turns": 2.0},
    }
    given = episode("e1", detail=detail, is_success=True)
    writer.episode(given)
    assert writer.flush()
    record = Record(path.parent)
    row = record.row("SELECT * FROM episodes")
    assert row is not None
    expected = {
        "number": 1,
        "uuid": "e1",
        "type": "train",
        "step": 1,
        "label": "",
        "group_id": "step-1/sample-0",
        "sample": 1,
        "status": "accepted",
        "reward": 1.0,
        "is_success": 1,
        "attempt": 1,
        "client": "worker-1",
        "started": 50,
        "ended": 2000.0,
        "calls": 2,
        "prompt_tokens": 4,
        "sampled_tokens": 3,
        "truncated": 1,
        "first_version": 3,
        "last_version": 6,
        "preview": "the last reply",
        "figures": '{"score/exact": 1.0, "turns": 2.0}',
    }
    assert dict(row) == expected
    assert record.detail(1) == given.detail
    assert record.detail(2) is None
    for words, found in (("last AND worker", 1), ("again", 1), ("user", 0), ("role", 0)):
        query = "SELECT count(*) FROM words WHERE words MATCH ?"
        assert record.number(query, (words,)) == found, words


def test_a_failed_episode_says_why(writer: RecordWriter, path: Path) -> None:
    failures = [{"kind": "timeout", "message": "m1"}, {"kind": "error", "message": "it broke"}]
    writer.episode(episode("e1", status="failed", reward=None, detail={"calls": [], "failures": failures}))
    writer.flush()
    (row,) = columns(
        Record(path.parent), "SELECT status, reward, first_version, started, preview FROM episodes"
    )
    assert row == ("failed", None, None, 0, "error: it broke")


def test_an_episode_said_again_is_ignored_also_by_a_later_writer(path: Path) -> None:
    with RecordWriter(path) as writer:
        writer.episode(episode("e1", reward=1.0))
        writer.episode(episode("e1", reward=0.0))
    with RecordWriter(path) as writer:
        writer.episode(episode("e1", reward=0.0))
        writer.episode(episode("e2", reward=0.25))
        assert writer.flush()
    assert columns(Record(path.parent), "SELECT uuid, reward FROM episodes") == [("e1", 1.0), ("e2", 0.25)]


def test_a_sample_is_stored_once_for_each_task_and_content(writer: RecordWriter, path: Path) -> None:
    samples = [
        ("sums", {"id": 1, "input": "a"}),
        ("sums", {"id": 1, "input": "a"}),
        ("sums", {"id": 1, "input": "b"}),
        ("words", {"id": 1, "input": "a"}),
        ("words", None),
    ]
    for number, (task, sample) in enumerate(samples):
        writer.episode(episode(f"e{number}", task=task, sample=sample))
    writer.flush()
    record = Record(path.parent)
    assert columns(record, "SELECT sample FROM episodes ORDER BY number") == [(1,), (1,), (2,), (3,), (None,)]
    assert columns(record, "SELECT task, id FROM samples") == [("sums", "1"), ("sums", "1"), ("words", "1")]


def test_an_episode_without_tokens_has_its_row_and_its_words(writer: RecordWriter, path: Path) -> None:
    writer.episode(episode("e1"), with_tokens=False)
    writer.flush()
    record = Record(path.parent)
    assert columns(record, "SELECT sampled_tokens, preview FROM episodes") == [(3, "reply e1")]
    assert record.detail(1) is None
    assert record.number("SELECT rowid FROM words WHERE words MATCH 'ask'") == 1


def test_what_a_step_did_is_read_by_step(writer: RecordWriter, path: Path) -> None:
    writer.episode(episode("e1"))
    for step in (1, 2):
        sequences = [trained_sequence(0, 3, reason="" if step == 1 else "late")]
        writer.trained(
            step, [TrainedEpisode(uuid="e1", outcome="trained", advantage=0.5, sequences=sequences)]
        )
    writer.trained(2, [TrainedEpisode(uuid="unknown", outcome="trained")])
    writer.flush()
    record = Record(path.parent)
    found = record.sequences(1)
    assert {step: [each.reason for each in sequences] for step, sequences in found.items()} == {
        1: [""],
        2: ["late"],
    }
    assert found[1] == [trained_sequence(0, 3)]
    assert record.number("SELECT count(*) FROM trained") == 2


def test_what_would_unpack_to_gigabytes_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record may be from elsewhere."""
    monkeypatch.setattr("tinkerscript.record.entries.MAX_UNPACKED_BYTES", 10**6)
    with RecordWriter(tmp_path / RECORD_FILE) as writer:
        writer.episode(episode("e"))
        writer.flush()
    bomb = zstandard.ZstdCompressor().compress(b"\x00" * 10**7)
    assert len(bomb) < 1000
    with sqlite3.connect(tmp_path / RECORD_FILE) as database:
        database.execute("UPDATE details SET detail = ?", (bomb,))
    database.close()
    record = Record(tmp_path)
    number = record.number("SELECT number FROM episodes")
    assert number is not None
    with pytest.raises(NotRecordedError, match="10000000 bytes are packed"):
        record.detail(int(number))


def test_packing_is_lossless_and_small() -> None:
    detail = EpisodeDetail(calls=episode("e").detail.calls * 50, metadata={"a": [1, None]})
    assert unpacked(packed(detail), EpisodeDetail) == detail
    assert len(packed(detail)) < 1500


# A resumed run


def test_a_resumed_run_takes_back_what_later_steps_left(path: Path) -> None:
    with RecordWriter(path) as writer:
        writer.episode(episode("used again", step=3))
        for step in (1, 2, 3):
            writer.episode(episode(f"e{step}", step=step))
            writer.trained(step, [TrainedEpisode(uuid=f"e{step}", outcome="trained")])
            writer.metrics(step, {"a": 1.0})
            writer.step(step, policy_version=step, accepted=1, failed=0, trained=1)
            writer.finding(step=step, kind="error", name="n", detail="", episode="", count=1)
            writer.evaluation(
                label=f"step-{step}", step=step, policy_version=1, score=1.0, accepted=1, failed=0
            )
            writer.episode(episode(f"v{step}", episode_type="eval", label=f"step-{step}", step=step))
        writer.episode(episode("v4", episode_type="eval", label="step-4", step=4))
        writer.note("kept")
    for _ in range(2):
        with RecordWriter(path) as writer:
            writer.resume(2, kept={"used again"})
            writer.episode(episode("late", step=3))
    record = Record(path.parent)
    for table in ("metrics", "steps", "trained", "findings", "evaluations"):
        assert columns(record, f"SELECT step FROM {table} ORDER BY 1") == [(1,), (2,)], table
    assert columns(record, "SELECT text FROM notes") == [("kept",)]
    query = (
        "SELECT uuid, resume FROM undone JOIN episodes ON episodes.number = undone.episode "
        "ORDER BY undone.episode"
    )
    assert columns(record, query) == [("e3", 1), ("v3", 1), ("v4", 1), ("late", 2)]
    resumes = columns(record, "SELECT number, step FROM resumes")
    assert resumes == [(1, 2), (2, 2)]


# The limit


def size(record: Record) -> float:
    details = record.number("SELECT coalesce(sum(length(detail)), 0) FROM details") or 0
    return details + (record.number("SELECT coalesce(sum(length(sequences)), 0) FROM trained") or 0)


def test_beyond_the_limit_the_oldest_tokens_go_and_the_rows_stay(path: Path) -> None:
    def of_200_kb(number: int) -> list[int]:
        return [(number * 1_000_003 + i * i * 7919) % 2**31 for i in range(50_000)]

    with RecordWriter(path, limit_mb=1) as writer:
        for number in range(8):
            call = said(None, [1], of_200_kb(number), "q", "a", logprobs=[-0.5] * 50_000)
            writer.episode(episode(f"e{number}", detail={"calls": [call]}))
            sequences = [trained_sequence(0, 3)]
            writer.trained(1, [TrainedEpisode(uuid=f"e{number}", outcome="trained", sequences=sequences)])
            assert writer.flush()
    record = Record(path.parent)
    kept = [number for number in range(1, 9) if record.detail(number) is not None]
    assert kept == list(range(9 - len(kept), 9)), "the newest"
    assert 2 <= len(kept) <= 6
    assert size(record) <= 2**20 < size(record) * (len(kept) + 1) / len(kept), "not more than had to go"
    assert [bool(record.sequences(number)) for number in range(1, 9)] == [n in kept for n in range(1, 9)]
    assert record.number("SELECT count(*) FROM episodes") == 8
    assert record.number("SELECT count(*) FROM trained") == 8
    with RecordWriter(path, limit_mb=1) as writer:
        call = said(None, [1], of_200_kb(9), "q", "a", logprobs=[-0.5] * 50_000)
        writer.episode(episode("e9", detail={"calls": [call]}))
    assert record.detail(9) is not None
    assert size(record) <= 2**20, "a later writer knows what is there"


def test_transcripts_are_read_by_attempt(writer: RecordWriter, path: Path) -> None:
    writer.episode(episode("e1"))
    writer.transcript("e1", 2, b"the second \xff")
    writer.transcript("e1", 1, b"the first")
    writer.transcript("e1", 1, b"said again")
    writer.transcript("nobody's", 1, b"lost")
    writer.flush()
    record = Record(path.parent)
    assert record.transcribed(1) == [1, 2]
    assert record.transcript(1, 1) == b"the first"
    assert record.transcript(1, 2) == b"the second \xff"
    assert record.transcript(1, 3) is None
    assert record.number("SELECT count(*) FROM transcripts") == 2


# Nothing stops the run


def test_a_disk_that_fails_is_told_once_and_what_is_lost_is_counted(path: Path) -> None:
    told: list[str] = []
    with RecordWriter(path, failed=told.append) as writer:
        writer.episode(episode("e1"))
        assert writer.flush()
        rewrite(path, "DROP TABLE metrics")
        writer.metrics(1, {"a": 1.0})
        assert not writer.flush()
        assert writer.failure == "OperationalError: no such table: metrics"
        assert told == [writer.failure]
        assert writer.dropped == 1
        writer.episode(episode("e2"))
        writer.status(state="running")
        assert not writer.flush()
        assert (writer.dropped, len(told)) == (2, 1)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT uuid FROM episodes").fetchall() == [("e1",)]


def no_folder(path: Path) -> Path:
    return path.parent / "missing" / RECORD_FILE


def no_database(path: Path) -> Path:
    path.write_bytes(b"this is not a database" * 100)
    return path


@pytest.mark.parametrize("broken", [no_folder, no_database])
def test_a_record_that_cannot_be_opened_does_not_stop_the_run(
    path: Path, broken: Callable[[Path], Path]
) -> None:
    told: list[str] = []
    with RecordWriter(broken(path), failed=told.append) as writer:
        writer.episode(episode("e1"))
        writer.resume(0)
        assert not writer.flush()
        assert writer.dropped == 2
    assert told == [writer.failure]
    assert "DatabaseError" in writer.failure or "OperationalError" in writer.failure


BAD = [
    {"detail": {"metadata": {"value": object()}}},
    {"sample": {"id": object()}},
    {"reward": 2**70},
    {"client_uuid": "\ud83d"},
    {"detail": {"calls": [said(None, [1], [2], "q", "a", reply="no JSON")]}},
]


@pytest.mark.parametrize("fields", BAD)
def test_an_entry_that_no_file_can_hold_is_dropped_alone(
    writer: RecordWriter, path: Path, fields: dict[str, object]
) -> None:
    writer.metrics(1, {"before": 1.0})
    writer.episode(episode("bad", sample=fields.pop("sample", {"id": "new"}), **fields))
    writer.metrics(1, {"after": 1.0})
    writer.episode(episode("good"))
    assert writer.flush()
    assert (writer.dropped, writer.failure) == (1, "")
    record = Record(path.parent)
    assert columns(record, "SELECT uuid FROM episodes") == [("good",)]
    assert columns(record, "SELECT id FROM samples") == [("s0",)]
    assert {name for (name,) in columns(record, "SELECT name FROM names")} == {"before", "after"}


def test_a_backlog_has_a_limit_of_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_BACKLOG_BYTES", 10_000)
    call = said(None, [1] * 1000, [2], "ask", "reply")  # More than 4,000 bytes, less than 5,000.
    with RecordWriter(path) as writer, locked(path) as other:
        for name in ("e1", "e2", "e3"):
            writer.episode(episode(name, detail={"calls": [call]}), with_tokens=name != "e2")
        assert writer.dropped == 1
        other.execute("ROLLBACK")
        assert writer.flush()
        writer.episode(episode("large", detail={"calls": [said(None, [1] * 10_000, [2], "ask", "reply")]}))
        assert writer.flush()
    found = columns(Record(path.parent), "SELECT uuid FROM episodes ORDER BY number")
    assert found == [("e1",), ("e2",), ("large",)]


# A lock


@contextmanager
def locked(path: Path) -> Generator[sqlite3.Connection]:
    """The file while another program writes to it, until that rolls back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite does not wait for a lock itself."""
    monkeypatch.setattr(schema_module, "BUSY_S", 0.0)
    monkeypatch.setattr(writer_module, "LOCKED_RETRY_S", 0.01)


class Told:
    """What a writer has said, and waiting for it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._more = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._more:
            self.texts.append(text)
            self._more.notify_all()

    def until(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.texts) >= count, 10), self.texts


@pytest.mark.usefixtures("impatient")
def test_a_lock_delays_entries_and_loses_none(path: Path) -> None:
    told, failures = Told(), Told()
    with RecordWriter(path, failed=failures, note=told) as writer:
        writer.status(step=1, state="running")
        assert writer.flush()
        with locked(path) as other:
            writer.episode(episode("e1"))
            writer.metrics(1, {"new name": 1.0})
            writer.status(step=2)
            told.until(1)
            writer.status(step=3)
            writer.note("said meanwhile")
            assert not writer.flush(0.1)
            other.execute("ROLLBACK")
        assert writer.flush()
        told.until(2)
        assert (writer.failure, writer.dropped) == ("", 0)
        record = Record(path.parent)
        assert record.facts() == {"step": 3, "state": "running"}
        assert columns(record, "SELECT uuid FROM episodes") == [("e1",)]
        assert columns(record, "SELECT name FROM names") == [("new name",)]
        assert columns(record, "SELECT text FROM notes") == [("said meanwhile",)]
    first, last = told.texts
    assert "record.sqlite is locked by another program (database is locked)" in first
    assert last == "record.sqlite is written again after 0 s: nothing is lost"
    assert not failures.texts


@pytest.mark.usefixtures("impatient")
def test_the_end_of_a_run_waits_for_a_lock_for_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "CLOSE_PATIENCE_S", 0.2)
    failures = Told()
    writer = RecordWriter(path, failed=failures)
    with locked(path):
        with writer:
            writer.note("never written")
        assert failures.texts == ["OperationalError: database is locked"]
    assert writer.dropped == 1
    assert Record(path.parent).number("SELECT count(*) FROM notes") == 0


WRITES_AND_DIES = """
import os, signal, sys
from pathlib import Path
from record_helpers import episode
from tinkerscript.record.writer import RecordWriter

with RecordWriter(Path(sys.argv[1])) as writer:
    writer.episode(episode("e1"))
    writer.flush()
    writer.episode(episode("e2"))
    writer._put(lambda run: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_writer_killed_within_a_transaction_leaves_a_readable_file(path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", WRITES_AND_DIES, str(path)], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    record = Record(path.parent)
    assert columns(record, "SELECT uuid FROM episodes") == [("e1",)]
    assert columns(record, "PRAGMA integrity_check") == [("ok",)]
    with RecordWriter(path) as writer:
        writer.episode(episode("e2"))
    assert columns(record, "SELECT uuid FROM episodes") == [("e1",), ("e2",)]


# Opening


def test_a_reader_cannot_write(writer: RecordWriter, path: Path) -> None:
    writer.flush()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        Record(path.parent).rows("DELETE FROM episodes")


def test_a_record_of_another_version_is_refused(path: Path) -> None:
    with RecordWriter(path):
        pass
    rewrite(path, f"PRAGMA user_version = {RECORD_VERSION + 1}")
    with pytest.raises(ConfigError, match=f"has schema version {RECORD_VERSION + 1}"):
        RecordWriter(path)
    with pytest.raises(ConfigError, match=f"has schema version {RECORD_VERSION + 1}"):
        Record(path.parent)


def test_a_folder_without_a_record_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{path.parent} has no record"):
        Record(path.parent)
    no_database(path)
    with pytest.raises(ConfigError, match="cannot be read: file is not a database"):
        Record(path.parent)


def test_a_folded_record_can_be_copied_by_itself(path: Path, tmp_path: Path) -> None:
    with RecordWriter(path) as writer:
        writer.episode(episode("e1"))
        writer.flush()
        checkpoint(path)
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / RECORD_FILE).write_bytes(path.read_bytes())
    assert columns(Record(copy), "SELECT uuid FROM episodes") == [("e1",)]
