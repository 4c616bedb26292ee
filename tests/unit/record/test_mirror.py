"""A mirror of a record: batches beyond marks, written over what is there; and what a sender may not do."""

from __future__ import annotations

import json
import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from record_helpers import episode, mirrored_rows, said, trained_sequence
from tinkerscript.errors import ConfigError
from tinkerscript.record import rows as rows_module
from tinkerscript.record.entries import EpisodeDetail, TrainedEpisode, packed
from tinkerscript.record.mirror import Mirror
from tinkerscript.record.reader import Record
from tinkerscript.record.rows import (
    DetailRow,
    EpisodeRow,
    EvaluationRow,
    FindingRow,
    Marks,
    MetricRow,
    NameRow,
    NoteRow,
    ResumeRow,
    RowBatch,
    SampleRow,
    StepRow,
    TrainedRow,
    TranscriptRow,
    UndoneRow,
    pack_batch,
    read_batch,
    unpack_batch,
)
from tinkerscript.record.schema import RECORD_FILE, open_for_reading
from tinkerscript.record.writer import RecordWriter


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "trainer").mkdir()
    return tmp_path / "trainer" / RECORD_FILE


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "server").mkdir()
    return tmp_path / "server"


def identity(source: Path) -> str:
    with closing(open_for_reading(source)) as record:
        return record.execute("SELECT session FROM resumes WHERE number = 1").fetchone()[0]


def opened(source: Path, there: Path, **more: Any) -> Mirror:
    return Mirror(there, **{"identity": identity(source), "limit_mb": 0, "model": "here"} | more)


def sent(source: Path, there: Path, *, size: int = 2000, batches: int = 10_000, **more: Any) -> int:
    """Send up to `batches`; returns how many there were."""
    facts: dict[str, str] = {}
    with opened(source, there, **more) as mirror, closing(open_for_reading(source)) as record:
        marks = mirror.marks()
        for number in range(batches):
            batch = read_batch(record, marks, facts, size=size)
            if batch.is_empty():
                return number
            marks = mirror.write(pack_batch(batch))
            facts |= batch.facts
    return batches


def write_steps(writer: RecordWriter, first: int, last: int, *, evaluates: bool = False) -> None:
    for step in range(first, last + 1):
        uuids = [f"{writer.session[:4]}-{step}-{number}" for number in range(4)]
        for number, uuid in enumerate(uuids):
            writer.episode(
                episode(uuid, step=step, reward=number / 4, sample={"id": f"s{step}", "input": "?"})
            )
            for attempt in range(1, 1 + number):
                writer.transcript(uuid, attempt, f"{uuid} {attempt}".encode() * 20)
        sequences = [trained_sequence(0, 3)]
        writer.trained(
            step, [TrainedEpisode(uuid=uuid, outcome="trained", sequences=sequences) for uuid in uuids]
        )
        writer.metrics(step, {"reward/mean": step / 7, f"only/{step}": 1.0})
        writer.step(step, policy_version=step, reward=0.5, accepted=4, failed=0, trained=4, max_lag=0)
        writer.finding(step=step, kind="warning", name="n", detail="d", episode=uuids[0], count=2)
        writer.note(f"step {step}")
        writer.status(step=step, state="running")
        if evaluates:
            label = f"step-{step}"
            writer.episode(
                episode(f"{writer.session[:4]}-{label}", episode_type="eval", label=label, step=step)
            )
            writer.metrics(step, {"eval/score": 0.25, "reward/mean": step / 7})
            writer.evaluation(label=label, step=step, policy_version=step, score=0.25, accepted=1, failed=0)
    assert writer.flush()


def test_a_mirror_has_the_same_rows_whatever_the_size_of_a_batch(source: Path, tmp_path: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        write_steps(writer, 1, 30, evaluates=True)
    for size in (1, 700, 10**9):
        there = tmp_path / f"of {size}"
        there.mkdir()
        count = sent(source, there, size=size)
        assert count == 3 if size == 10**9 else count > 100, "resumes, and the metrics of 20 steps each"
        assert mirrored_rows(there) == mirrored_rows(source.parent)


def test_rows_are_those_of_the_tables(source: Path) -> None:
    kinds: dict[str, Any] = {
        **{"resumes": ResumeRow, "names": NameRow, "metrics": MetricRow, "steps": StepRow, "notes": NoteRow},
        **{"findings": FindingRow, "samples": SampleRow, "episodes": EpisodeRow, "details": DetailRow},
        **{"undone": UndoneRow, "trained": TrainedRow, "evaluations": EvaluationRow},
        "transcripts": TranscriptRow,
    }
    with RecordWriter(source):
        pass
    with closing(open_for_reading(source)) as record:
        for table, kind in kinds.items():
            columns = [row["name"] for row in record.execute(f"PRAGMA table_info({table})")]
            fields = [name for name in kind._fields if name != "rowid"]
            assert ["count" if name == "times" else name for name in fields] == columns, table


def test_only_what_is_new_is_read_again(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        write_steps(writer, 1, 3)
        sent(source, there)
        with opened(source, there) as mirror, closing(open_for_reading(source)) as record:
            marks = mirror.marks()
            facts = dict(record.execute("SELECT name, value FROM run").fetchall())
            assert read_batch(record, marks, facts).is_empty()
            writer.metrics(3, {"late": 1.0})
            writer.status(step=4)
            assert writer.flush()
            batch = read_batch(record, marks, facts)
            assert [name.name for name in batch.names] == ["late"]
            assert [row.step for row in batch.metrics] == [3, 3, 3], "the last step's are whole"
            assert batch.facts == {"step": "4"}
            assert [batch.episodes, batch.trained, batch.steps, batch.samples] == [[]] * 4


@pytest.mark.parametrize("seed", range(6))
def test_ends_that_come_and_go_lose_and_double_nothing(source: Path, there: Path, seed: int) -> None:
    """A trainer that is killed and resumed, between batches of a mirror that is closed and opened."""
    chance = random.Random(seed)
    at = 0
    for _ in range(5):
        with RecordWriter(source) as writer:
            at = chance.randint(max(0, at - 3), at)
            writer.resume(at, kept={uuid for uuid in writer.episode_uuids() if chance.random() < 0.3})
            for _ in range(chance.randint(1, 4)):
                write_steps(writer, at + 1, at + 1, evaluates=chance.random() < 0.5)
                at += 1
                sent(source, there, size=chance.choice([1, 500, 5000]), batches=chance.randint(0, 6))
    assert mirrored_rows(there) != mirrored_rows(source.parent)
    sent(source, there)
    assert mirrored_rows(there) == mirrored_rows(source.parent)


def test_a_full_mirror_is_not_sent_again_what_it_dropped(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        for uuid in ("e1", "e2"):
            writer.episode(episode(uuid))
        for uuid in ("e2", "e1"):  # The last to come is the first to go.
            writer.transcript(uuid, 1, random.Random(uuid).randbytes(2**20 - 2000))
        assert writer.flush()
    assert sent(source, there, limit_mb=1, batches=20) < 20
    assert sent(source, there, limit_mb=1, batches=20) == 0
    with closing(open_for_reading(there / RECORD_FILE)) as mirrored:
        assert [row["episode"] for row in mirrored.execute("SELECT episode FROM transcripts")] == [2]


def test_a_batch_that_comes_twice_is_there_once(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        write_steps(writer, 1, 2, evaluates=True)
    with opened(source, there) as mirror, closing(open_for_reading(source)) as record:
        for _ in range(2):
            batch = pack_batch(read_batch(record, mirror.marks(), {}, size=10**9))
            assert mirror.write(batch) == mirror.write(batch)
    assert mirrored_rows(there) == mirrored_rows(source.parent)
    with closing(sqlite3.connect(there / RECORD_FILE)) as connection:
        connection.execute("INSERT INTO words(words) VALUES ('integrity-check')")
    query = "SELECT count(*) FROM words WHERE words MATCH 'reply'"
    assert Record(there).number(query) == Record(source.parent).number(query) == 10


def test_the_search_finds_what_it_finds_where_the_trainer_is(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        writer.episode(episode("e1", task="sums"))
        writer.episode(episode("e2", task="sums", detail={"calls": [said(None, [1], [2], "q", "rare word")]}))
    sent(source, there, size=1)
    for words in ("sums", "rare", '"ask e1"', "e2", "worker"):
        found = "SELECT group_concat(rowid) FROM words WHERE words MATCH ?"
        both = [Record(folder).row(found, (words,)) for folder in (there, source.parent)]
        assert both[0] is not None
        assert both[1] is not None
        assert tuple(both[0]) == tuple(both[1]) != (None,), words


def test_the_oldest_tokens_go_beyond_the_limit(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        for number in range(6):
            noise = os.urandom(300_000)
            writer.episode(episode(f"e{number}"))
            sequences = [trained_sequence(0, 3, trainer_logprobs=noise)]
            writer.trained(1, [TrainedEpisode(uuid=f"e{number}", outcome="trained", sequences=sequences)])
            assert writer.flush()
    sent(source, there, limit_mb=1)
    kept = [bool(Record(there).sequences(number)) for number in range(1, 7)]
    assert kept == [False, False, False, True, True, True]
    assert Record(there).number("SELECT count(*) FROM episodes") == 6


def test_what_is_too_large_is_left_where_it_is(
    source: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MAX_BLOB_BYTES", 1000)
    noise = os.urandom(3000)
    with RecordWriter(source) as writer:
        writer.resume(0)
        writer.episode(episode("e1", sample={"id": "s", "input": noise.hex()}, detail={"chat": noise}))
        sequences = [trained_sequence(0, 3, trainer_logprobs=noise)]
        writer.trained(1, [TrainedEpisode(uuid="e1", outcome="trained", sequences=sequences)])
    sent(source, there)
    record = Record(there)
    assert record.detail(1) is None
    assert record.sequences(1) == {}
    row = record.row("SELECT sample FROM samples")
    assert row is not None
    assert json.loads(row[0])["id"] == "s"
    assert sent(source, there) == 0, "what was left out is not tried again"


# Whose record it is


def test_a_record_that_is_no_mirror_of_this_run_is_not_written(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
    with RecordWriter(there / RECORD_FILE) as writer:
        writer.resume(0)
    before = (there / RECORD_FILE).read_bytes()
    with pytest.raises(ConfigError, match="is the record of another run; move it away"):
        opened(source, there)
    with pytest.raises(ConfigError, match="an earlier copy of this run's record"):
        opened(source, source.parent)
    assert (there / RECORD_FILE).read_bytes() == before
    (there / RECORD_FILE).unlink()
    sent(source, there)
    with pytest.raises(ConfigError, match="the mirror of another run's record"):
        opened(source, there, identity="other")


def test_a_file_is_shared_with_its_writer_alone(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        assert writer.flush()
        sent(source, there)
        found = {name: Record(folder) for name, folder in (("own", source.parent), ("mirror", there))}
        assert found["own"].is_written_by(writer.session)
        assert not found["mirror"].is_written_by(writer.session), "it has the same rows"
        assert not found["own"].is_written_by("another")


def test_a_mirror_knows_its_own_model_and_when_it_heard(source: Path, there: Path) -> None:
    with RecordWriter(source) as writer:
        writer.resume(0)
        writer.status(model="/home/trainer/model")
    sent(source, there, clock=lambda: 77.0)
    assert (Record(there).model(), Record(there).heard()) == ("here", 77.0)
    assert (Record(source.parent).model(), Record(source.parent).heard()) == ("/home/trainer/model", None)


# A hostile or faulty sender


def row(**changes: Any) -> EpisodeRow:
    given: dict[str, Any] = {
        **{
            "number": 1,
            "uuid": "e",
            "type": "train",
            "step": 1,
            "label": "",
            "group_id": "g",
            "sample": None,
        },
        **{
            "status": "accepted",
            "reward": 1.0,
            "is_success": None,
            "attempt": 1,
            "client": "c",
            "started": 0,
        },
        **{"ended": 1.0, "calls": 1, "prompt_tokens": 1, "sampled_tokens": 1, "truncated": 0},
        **{"first_version": 0, "last_version": 0, "preview": "", "figures": "{}"},
    }
    return EpisodeRow(**given | changes)


def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor().compress(b"\xc0" * size)


NO_CALL = packed(EpisodeDetail(calls=[said(None, [1], [2], "q", "a", reply="no JSON")]))
HOSTILE: dict[str, Any] = {
    "no frame": b"DROP TABLE episodes",
    "not a batch": zstandard.ZstdCompressor().compress(b"\x93\x01\x02\x03"),
    "of unknown size": zstandard.ZstdCompressor(write_content_size=False).compress(b"\x80"),
    "larger than it may be": bomb(65 * 2**20),
    "an unknown kind": RowBatch(episodes=[row(type="other")]),
    "a number beyond SQLite's": zstandard.ZstdCompressor().compress(
        msgspec.msgpack.encode({"notes": [[2**60, 1.0, "x"]]})
    ),
    "text where bytes belong": zstandard.ZstdCompressor().compress(
        msgspec.msgpack.encode({"details": [[1, "text"]]})
    ),
    "a fact that is no JSON": RowBatch(facts={"state": "running"}),
    "a state that is none": RowBatch(facts={"state": '"hacked"'}),
    "a process that is none": RowBatch(facts={"process": "[1]"}),
    "a fact that hides another": RowBatch(facts={"x": '1, "state": 5'}),
    "figures that are none": RowBatch(episodes=[row(figures='{"a": "b"}')]),
    "a sample that is none": RowBatch(samples=[SampleRow(1, b"d", "t", "i", b"[" * 100_000)]),
    "calls that are none": RowBatch(episodes=[row()], details=[DetailRow(1, packed({"calls": [1]}))]),
    "calls that explode": RowBatch(episodes=[row()], details=[DetailRow(1, bomb(257 * 2**20))]),
    "a reply that is no JSON": RowBatch(episodes=[row()], details=[DetailRow(1, NO_CALL)]),
    "tokens that are none": RowBatch(trained=[TrainedRow(1, 1, "trained", None, b"x")]),
}


@pytest.fixture
def mirror(there: Path) -> Iterator[Mirror]:
    with Mirror(there, identity="i", limit_mb=0, model="m") as mirror:
        mirror.write(
            pack_batch(RowBatch(resumes=[ResumeRow(1, 0, 0.0, "i")], notes=[NoteRow(1, 0.0, "kept")]))
        )
        yield mirror


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_a_batch_is_refused_whole(mirror: Mirror, there: Path, name: str) -> None:
    given, before = HOSTILE[name], mirrored_rows(there)
    data = given if isinstance(given, bytes) else pack_batch(given)
    with pytest.raises(ValueError, match=r"packed|record|calls"):
        mirror.write(data)
    assert mirrored_rows(there) == before
    assert {path.name.removesuffix("-wal").removesuffix("-shm") for path in there.iterdir()} == {RECORD_FILE}
    good = RowBatch(notes=[NoteRow(2, 0.0, "'); DROP TABLE notes; --")])
    assert mirror.write(pack_batch(good)).notes == 2


def test_a_file_that_is_full_takes_no_more_and_stays_whole(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkerscript.record.mirror.SPARE_MB", 1)

    def fill(mirror: Mirror) -> None:
        for number in range(1, 100):
            noise = os.urandom(50_000).hex()
            mirror.write(pack_batch(RowBatch(notes=[NoteRow(number, 0.0, noise)])))

    with Mirror(there, identity="i", limit_mb=1, model="m") as mirror:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            fill(mirror)
        assert 10 < mirror.marks().notes < 40
    assert (there / RECORD_FILE).stat().st_size <= 3 * 2**20


def test_marks_are_bounded() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"episodes": -5}), type=Marks)
    assert unpack_batch(pack_batch(RowBatch())) == RowBatch()
