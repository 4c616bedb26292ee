"""The first screen of a run, and the list of runs: state, progress, score, health, the newest rollouts.

Invariants: nothing here reads all episodes, so the first screen takes the same time after a million of them.
One look at the record a second serves all streams of a run (`RunEvents`), and there is none without streams.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from tinkerscript import __version__
from tinkerscript.dashboard.progress import time_left_s
from tinkerscript.errors import TinkerScriptError
from tinkerscript.lifecycle import ProcessId
from tinkerscript.page.annotation import Annotation, read_annotation
from tinkerscript.page.lines import EpisodeLine, newest
from tinkerscript.record.health import Gain, HealthRow, gain, health_rows, sample_scores, verdict
from tinkerscript.record.reader import Record

NEWEST = 12
RECENT_STEPS = 50
"""Steps whose pace tells how long the rest will take."""

EVALUATIONS = 20

State = Literal["running", "finished", "stopped", "failed"]


class CurrentWait(BaseModel):
    """What a run waits for."""

    what: str
    since: float = Field(description="Unix time in seconds.")


class PhaseProgress(BaseModel):
    """A batch of episodes in progress."""

    label: str
    done: int
    total: int = Field(description="0: unknown, since clients register the samples.")


class Evaluation(BaseModel):
    """A score on held-out samples."""

    label: str
    step: int
    time: float
    policy_version: int
    score: float | None
    accepted: int
    failed: int


class FailureCount(BaseModel):
    """Episodes that failed alike."""

    kind: str
    count: int
    example: EpisodeLine | None = Field(description="The newest one.")


class Health(BaseModel):
    """What deserves a look. Counts are over the whole run."""

    episodes: int = Field(description="Training episodes with a result.")
    failed: int
    failures: list[FailureCount]
    retried: int
    rows: list[HealthRow] = Field(description="What was judged, by the last steps; empty before the first.")
    verdict: str = Field(description="Such as `all well` and `needs attention: reply length`.")


class Note(BaseModel):
    time: float
    text: str


class RunLine(Annotation):
    """A run in the list."""

    name: str
    state: State
    method: str
    model: str
    learning_rate: float | None
    tasks: list[str]
    failure: str = Field(description="Why it failed; empty for any other.")
    step: int
    steps: int
    began: float
    updated: float
    score_before: float | None = Field(description="Of the first evaluation, once there is a later one.")
    score: float | None = Field(description="Of the newest evaluation.")
    reward: float | None


class RunView(RunLine):
    """A run's first screen."""

    folder: str
    time_left_s: float | None
    waiting: CurrentWait | None
    phase: PhaseProgress | None
    evaluations: list[Evaluation] = Field(description="The first one and the newest ones, in order.")
    gain: Gain | None = Field(description="Of the last evaluation over the first one, sample by sample.")
    health: Health
    newest: list[EpisodeLine]
    notes: list[Note]
    recording: str
    policy_version: int | None
    episodes: int = Field(description="All that ended, evaluations included.")


def run_line(name: str, record: Record) -> RunLine:
    facts = record.facts()
    return RunLine.model_validate(_line(name, record, facts))


class RunList(BaseModel):
    """The runs that are here, newest first."""

    runs: list[RunLine]
    version: str = Field(description="Of tinkerscript.")


def run_list(records: Mapping[str, Record]) -> RunList:
    """`records`: by the run's name."""
    lines = [run_line(name, record) for name, record in records.items()]
    return RunList(runs=sorted(lines, key=lambda line: -line.began), version=__version__)


def _line(name: str, record: Record, facts: dict[str, Any]) -> dict[str, Any]:
    first = record.row("SELECT label, score FROM evaluations ORDER BY step, time LIMIT 1")
    last = record.row("SELECT label, score FROM evaluations ORDER BY step DESC, time DESC LIMIT 1")
    return {
        **read_annotation(record.folder).model_dump(),
        "name": name,
        "state": state(facts),
        "method": facts.get("method", ""),
        "model": facts.get("model", ""),
        "learning_rate": _learning_rate(record, facts),
        "tasks": facts.get("tasks", []),
        "failure": facts.get("failure", ""),
        "step": facts.get("step", 0),
        "steps": facts.get("steps", 0),
        "began": facts.get("began", 0.0),
        "updated": _updated(record, facts),
        "score_before": first["score"] if first and last and first["label"] != last["label"] else None,
        "score": last and last["score"],
        "reward": newest_value(record, "reward/mean"),
    }


def _learning_rate(record: Record, facts: dict[str, Any]) -> float | None:
    """The config's, or of one that was chosen by what trains, that of the newest step."""
    section = "sft" if facts.get("method") == "sft" else "training"
    said = facts.get("config", {}).get(section, {}).get("learning_rate")
    return said if isinstance(said, float) else newest_value(record, "train/learning_rate")


def overview(name: str, record: Record) -> RunView:
    """The first screen."""
    facts = record.facts()
    line = _line(name, record, facts)
    live = line["state"] == "running"
    phase = facts.get("phase") if live else None
    evaluated = evaluations(record, newest=EVALUATIONS)
    return RunView(
        **line,
        folder=str(record.folder),
        time_left_s=_time_left_s(record, facts) if live else None,
        waiting=_waiting(facts) if live else None,
        phase=PhaseProgress.model_validate(phase) if phase else None,
        evaluations=evaluated,
        gain=_gain(record, evaluated),
        health=health(record),
        newest=newest(record, limit=NEWEST).episodes,
        notes=[
            Note(time=row[0], text=row[1])
            for row in record.rows("SELECT time, text FROM notes ORDER BY number DESC LIMIT 20")
        ],
        recording=facts.get("recording", ""),
        policy_version=_int(record.number("SELECT policy_version FROM steps ORDER BY step DESC LIMIT 1")),
        episodes=int(record.number("SELECT coalesce(max(number), 0) FROM episodes") or 0),
    )


def _waiting(facts: dict[str, Any]) -> CurrentWait | None:
    what = facts.get("waiting_for")
    return CurrentWait(what=what, since=facts.get("waiting_since", 0.0)) if what else None


def state(facts: dict[str, Any]) -> State:
    """As the trainer said last; one that is gone without a word was stopped."""
    said: State = facts.get("state", "stopped")
    if said == "running" and "process" in facts and ProcessId(*facts["process"]).is_gone():
        return "stopped"
    return said


def evaluations(record: Record, *, newest: int | None = None) -> list[Evaluation]:
    """All evaluations in order, or the first one and the `newest`."""
    columns = "label, step, time, policy_version, score, accepted, failed"
    query = f"SELECT {columns} FROM evaluations ORDER BY step, time"
    rows = record.rows(query)
    kept = rows if newest is None or len(rows) <= newest else [rows[0], *rows[-newest:]]
    return [Evaluation.model_validate(dict(row)) for row in kept]


def _gain(record: Record, evaluated: list[Evaluation]) -> Gain | None:
    if len(evaluated) < 2:
        return None
    first, last = (
        sample_scores(record, step=each.step, label=each.label) for each in (evaluated[0], evaluated[-1])
    )
    return gain(first, last)


def health(record: Record) -> Health:
    rows = health_rows(record)
    return Health(
        episodes=int(_total(record, "episodes/accepted")),
        failed=int(_total(record, "episodes/failed")),
        failures=_failures(record),
        retried=int(_total(record, "episodes/retried")),
        rows=rows,
        verdict=verdict(rows),
    )


def _failures(record: Record) -> list[FailureCount]:
    """Failed training episodes by the kind of their last failure."""
    query = "SELECT name FROM names WHERE name LIKE 'failure/%' ORDER BY name"
    found: list[FailureCount] = []
    for (name,) in record.rows(query):
        kind = name.removeprefix("failure/")
        found.append(
            FailureCount(kind=kind, count=int(_total(record, name)), example=_example(record, f"{kind}:"))
        )
    return sorted(found, key=lambda failure: -failure.count)


def _example(record: Record, preview: str) -> EpisodeLine | None:
    # Failed episodes have an index of their own.
    query = (
        "SELECT number FROM episodes WHERE status != 'accepted' AND substr(preview, 1, ?) = ? "
        "ORDER BY number DESC LIMIT 1"
    )
    number = record.number(query, (len(preview), preview))
    return newest(record, before=int(number) + 1, limit=1).episodes[0] if number is not None else None


_VALUES = "SELECT {what} FROM metrics WHERE name = (SELECT number FROM names WHERE name = ?)"


def _total(record: Record, name: str) -> float:
    return record.number(_VALUES.format(what="coalesce(sum(value), 0)"), (name,)) or 0.0


def newest_value(record: Record, name: str) -> float | None:
    """The value of a metric at the newest step that has it."""
    return record.number(_VALUES.format(what="value") + " ORDER BY step DESC LIMIT 1", (name,))


def _updated(record: Record, facts: dict[str, Any]) -> float:
    last = record.number("SELECT ended FROM episodes ORDER BY number DESC LIMIT 1") or 0.0
    return max(last, facts.get("last_step", 0.0), facts.get("began", 0.0), facts.get("waiting_since", 0.0))


def _time_left_s(record: Record, facts: dict[str, Any]) -> float | None:
    """Until the last step, at the pace of the last ones; see `time_left_s`."""
    query = f"SELECT step, time FROM steps ORDER BY step DESC LIMIT {RECENT_STEPS}"
    rows = [row for row in record.rows(query) if row["time"] >= facts.get("began", 0.0)]
    if len(rows) < 2:
        return None
    first, last = ((row["step"], row["time"]) for row in (rows[-1], rows[0]))
    return time_left_s(facts.get("steps", 0), first, last, time.time())


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
EVENT_EVERY_S = 15.0
"""A stream that is silent for this long sends a comment, so that the connection stays open."""


class RunEvents:
    """The streams of one run. For one event loop."""

    def __init__(self, run: str, record: Record) -> None:
        self._run = run
        self._record = record
        self._streams = 0
        self._looking: asyncio.Task[None] | None = None
        self._event = b""
        self._changed = asyncio.Event()

    async def stream(self, is_disconnected: Callable[[], Awaitable[bool]]) -> AsyncGenerator[bytes]:
        """The events of one page, from the present state on."""
        self._streams += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name=f"events of {self._run}")
        sent = b""
        try:
            while not await is_disconnected():
                if self._event and self._event is not sent:
                    sent = self._event
                    yield sent
                    continue
                changed = self._changed
                try:
                    async with asyncio.timeout(EVENT_EVERY_S):
                        await changed.wait()
                except TimeoutError:
                    yield b": ping\n\n"
        finally:
            self._streams -= 1
            if not self._streams:
                await self._stop_looking()

    async def _stop_looking(self) -> None:
        looking, self._looking, self._event = self._looking, None, b""
        if looking is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            try:
                event = await asyncio.to_thread(self._read)
            except (sqlite3.Error, TinkerScriptError) as error:  # The folder may be gone; it may come back.
                logger.warning("page.look_failed %s: %s", self._run, error)
                event = self._event
            if event != self._event:
                self._event = event
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(LOOK_EVERY_S)

    def _read(self) -> bytes:
        return b"event: run\ndata: " + overview(self._run, self._record).model_dump_json().encode() + b"\n\n"
