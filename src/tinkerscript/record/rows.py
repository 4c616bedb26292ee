"""A record's rows as they travel: `read_batch` reads those beyond a mirror's `Marks`, some at a time.

Invariant: a batch is read in one transaction, and holds no row before another that it refers to. Whoever
writes its rows over those of the batches before has what the record had then (`mirror`).
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import zstandard

T = TypeVar("T")

BATCH_BYTES = 256 * 1024
"""Of rows, before compression, after which a batch is closed; the row that goes beyond it is in it."""

MAX_BATCH_BYTES = 64 * 2**20
"""Of a batch, before compression. What a mirror is sent beyond it, it does not unpack."""

MAX_BLOB_BYTES = 48 * 2**20
"""Of an episode's calls, of its tokens in one step, or of a sample; a mirror goes without larger ones."""

STEPS_AT_ONCE = 20
"""Whose metrics are read together."""

LEVEL = 3

Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class ResumeRow(NamedTuple):
    number: Number
    step: Integer
    time: float
    session: str


class NameRow(NamedTuple):
    number: Number
    name: str


class MetricRow(NamedTuple):
    name: Number
    step: Integer
    value: float


class StepRow(NamedTuple):
    step: Integer
    time: float
    policy_version: Integer
    reward: float | None
    accepted: Integer
    failed: Integer
    trained: Integer
    max_lag: Integer | None


class EvaluationRow(NamedTuple):
    rowid: Number
    label: str
    step: Integer
    time: float
    policy_version: Integer
    score: float | None
    accepted: Integer
    failed: Integer


class FindingRow(NamedTuple):
    number: Number
    step: Integer
    kind: str
    name: str
    detail: str
    episode: str
    times: Integer


class NoteRow(NamedTuple):
    number: Number
    time: float
    text: str


class SampleRow(NamedTuple):
    number: Number
    digest: bytes
    task: str
    id: str
    sample: bytes


class EpisodeRow(NamedTuple):
    number: Number
    uuid: str
    type: Literal["train", "eval"]
    step: Integer
    label: str
    group_id: str
    sample: Number | None
    status: Literal["accepted", "failed", "cancelled"]
    reward: float | None
    is_success: Literal[0, 1] | None
    attempt: Integer
    client: str
    started: Integer
    ended: float
    calls: Integer
    prompt_tokens: Integer
    sampled_tokens: Integer
    truncated: Integer
    first_version: Integer | None
    last_version: Integer | None
    preview: str
    figures: str


class DetailRow(NamedTuple):
    episode: Number
    detail: bytes


class TranscriptRow(NamedTuple):
    number: Number
    episode: Number
    attempt: Integer
    transcript: bytes


class UndoneRow(NamedTuple):
    number: Number
    episode: Number
    resume: Number


class TrainedRow(NamedTuple):
    episode: Number
    step: Integer
    outcome: str
    advantage: float | None
    sequences: bytes | None


class RowBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Rows of each table, in the order in which they are to be written. An empty one says that the trainer
    is there."""

    facts: dict[str, str] = {}
    """Those of `run` that have changed: name -> JSON."""

    resumes: list[ResumeRow] = []
    names: list[NameRow] = []
    metrics: list[MetricRow] = []
    steps: list[StepRow] = []
    evaluations: list[EvaluationRow] = []
    findings: list[FindingRow] = []
    notes: list[NoteRow] = []
    samples: list[SampleRow] = []
    episodes: list[EpisodeRow] = []
    details: list[DetailRow] = []
    """Of some of these `episodes`."""

    transcripts: list[TranscriptRow] = []
    """Of these `episodes` and of earlier ones."""

    undone: list[UndoneRow] = []
    trained: list[TrainedRow] = []

    def is_empty(self) -> bool:
        return not any(getattr(self, name) for name in self.__struct_fields__)


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Up to which rows a record is there."""

    resumes: Number = 0
    session: str = ""
    """Of the last of these `resumes`."""

    names: Number = 0
    metrics: tuple[Integer, Integer] = (-1, 0)
    """The last step with metrics, which may get more, and a checksum of those that it has."""

    steps: Integer = -1
    evaluations: Number = 0
    findings: Number = 0
    notes: Number = 0
    samples: Number = 0
    episodes: Number = 0
    transcripts: Number = 0
    """The last that was ever there: a full mirror drops some."""

    undone: Number = 0
    trained: tuple[Integer, Number] = (-1, 0)
    """The last (step, episode) in this order."""


_encode = msgspec.msgpack.Encoder().encode


def pack_batch(batch: RowBatch) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(_encode(batch))


def unpack_batch(data: bytes) -> RowBatch:
    """Raises ValueError for what is not a packed batch, or is too large."""
    return unpack_bounded(data, RowBatch, MAX_BATCH_BYTES)


def unpack_bounded(data: bytes, kind: type[T], limit: int) -> T:
    """What `entries.packed` or `pack_batch` packed, if that is a `kind` of at most `limit` bytes; it is not
    unpacked otherwise. Raises ValueError."""
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= limit:
            raise ValueError(f"{size} bytes are packed, and at most {limit} are taken (-1: it does not say)")
        # A second frame behind the first is not looked at.
        return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data), type=kind)
    except (zstandard.ZstdError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a packed {getattr(kind, '__name__', kind)}: {error}") from error


def read_marks(record: sqlite3.Connection) -> Marks:
    """The marks of the record behind a connection."""
    resume = record.execute("SELECT number, session FROM resumes ORDER BY number DESC LIMIT 1").fetchone()
    query = "SELECT step, episode FROM trained ORDER BY step DESC, episode DESC LIMIT 1"
    trained = record.execute(query).fetchone()
    last = _newest_step(record)
    return Marks(
        resumes=resume[0] if resume else 0,
        session=resume[1] if resume else "",
        metrics=(last, _checksum(record, last)),
        steps=_last(record, "SELECT max(step) FROM steps", -1),
        evaluations=_last(record, "SELECT max(rowid) FROM evaluations"),
        transcripts=_last(record, "SELECT max(seq) FROM sqlite_sequence WHERE name = 'transcripts'"),
        trained=(trained[0], trained[1]) if trained else (-1, 0),
        **{
            table: _last(record, f"SELECT max(number) FROM {table}")
            for table in ("names", "findings", "notes", "samples", "episodes", "undone")
        },
    )


def _last(record: sqlite3.Connection, query: str, default: int = 0) -> int:
    (found,) = record.execute(query).fetchone()
    return default if found is None else found


# No index leads with the step: each name is looked up by itself.
_METRICS = """
SELECT metrics.name, step, value FROM names CROSS JOIN metrics ON metrics.name = names.number
    AND metrics.step BETWEEN ? AND ? ORDER BY step, metrics.name
"""
_NEWEST = "SELECT max((SELECT max(step) FROM metrics WHERE name = names.number)) FROM names"
_NEXT = "SELECT min((SELECT min(step) FROM metrics WHERE name = names.number AND step > ?)) FROM names"


def _newest_step(record: sqlite3.Connection) -> int:
    return _last(record, _NEWEST, -1)


def _checksum(record: sqlite3.Connection, step: int) -> int:
    rows = [(row[0], row[2]) for row in record.execute(_METRICS, (step, step))]
    return zlib.crc32(_encode(rows)) if rows else 0


_NUMBERED = "SELECT * FROM {table} WHERE number > ? ORDER BY number"


class _Budget:
    """What is left of a batch's bytes."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, rows: Iterator[tuple[Any, ...]], kind: Callable[..., T]) -> list[T]:
        found: list[T] = []
        while self.left > 0 and (row := next(rows, None)) is not None:
            self.left -= sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            found.append(kind(*row))
        return found


def read_batch(
    record: sqlite3.Connection, marks: Marks, facts: Mapping[str, str], *, size: int = BATCH_BYTES
) -> RowBatch:
    """The next rows for a mirror with these `marks` and `facts`; empty if it has all.

    `record`: a connection that reads. After a restart of the trainer, the first batch has only its `resumes`:
    what they take back changes the marks. Raises sqlite3.Error.
    """
    record.execute("BEGIN")
    try:
        return _read(record, marks, facts, _Budget(size))
    finally:
        record.execute("COMMIT")


def _read(record: sqlite3.Connection, marks: Marks, facts: Mapping[str, str], budget: _Budget) -> RowBatch:
    def after(table: str, mark: int, kind: Callable[..., T]) -> list[T]:
        return budget.take(record.execute(_NUMBERED.format(table=table), (mark,)), kind)

    if resumes := after("resumes", marks.resumes, ResumeRow):
        return RowBatch(resumes=resumes)
    rows = record.execute("SELECT name, value FROM run")
    batch = RowBatch(facts={name: value for name, value in rows if facts.get(name) != value})
    budget.left -= sum(map(len, batch.facts.values()))
    batch.names = after("names", marks.names, NameRow)
    batch.metrics = _metrics(record, marks, budget)
    query = "SELECT * FROM steps WHERE step > ? ORDER BY step"
    batch.steps = budget.take(record.execute(query, (marks.steps,)), StepRow)
    query = "SELECT rowid, * FROM evaluations WHERE rowid > ? ORDER BY rowid"
    batch.evaluations = budget.take(record.execute(query, (marks.evaluations,)), EvaluationRow)
    batch.findings = after("findings", marks.findings, FindingRow)
    batch.notes = after("notes", marks.notes, NoteRow)
    batch.samples = [_small(row) for row in after("samples", marks.samples, SampleRow)]
    if budget.left > 0:
        _add_episodes(record, batch, marks, budget)
    last = batch.episodes[-1].number if batch.episodes else marks.episodes
    rows = record.execute(_NUMBERED.format(table="transcripts"), (marks.transcripts,))
    batch.transcripts = budget.take(takewhile(lambda row: row[1] <= last, rows), TranscriptRow)
    batch.undone = after("undone", marks.undone, UndoneRow)
    query = "SELECT * FROM trained WHERE (step, episode) > (?, ?) ORDER BY step, episode"
    trained = budget.take(record.execute(query, marks.trained), TrainedRow)
    batch.trained = [
        row._replace(sequences=None) if len(row.sequences or b"") > MAX_BLOB_BYTES else row for row in trained
    ]
    return batch


def _metrics(record: sqlite3.Connection, marks: Marks, budget: _Budget) -> list[MetricRow]:
    """All of the next steps': a checksum is of whole steps."""
    step, checksum = marks.metrics
    if budget.left <= 0:
        return []
    if step < 0 or _checksum(record, step) == checksum:
        step = _last(record, _NEXT.replace("?", str(int(step))), -1)
    if step < 0:
        return []
    rows = [MetricRow(*row) for row in record.execute(_METRICS, (step, step + STEPS_AT_ONCE - 1))]
    budget.left -= 24 * len(rows)
    return rows


def _add_episodes(record: sqlite3.Connection, batch: RowBatch, marks: Marks, budget: _Budget) -> None:
    """Episodes with what is kept of their calls."""
    query = (
        "SELECT episodes.*, details.detail FROM episodes LEFT JOIN details ON details.episode = "
        "episodes.number WHERE episodes.number > ? ORDER BY episodes.number"
    )
    for *columns, detail in budget.take(record.execute(query, (marks.episodes,)), lambda *row: row):
        row = EpisodeRow(*columns)
        batch.episodes.append(row)
        if detail is not None and len(detail) <= MAX_BLOB_BYTES:
            batch.details.append(DetailRow(row.number, detail))


def _small(row: SampleRow) -> SampleRow:
    if len(row.sample) <= MAX_BLOB_BYTES:
        return row
    stub = {
        "id": row.id,
        "input": f"(a sample of {len(row.sample)} bytes, which is only where the trainer is)",
    }
    return row._replace(sample=json.dumps(stub).encode())
