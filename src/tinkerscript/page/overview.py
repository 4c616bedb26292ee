"""The first screen of a run, and the list of runs, without reading all episodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel, Field

from tinkerscript import __version__
from tinkerscript.dashboard.progress import time_left_s
from tinkerscript.errors import TinkerScriptError
from tinkerscript.ledger.health import Gain, HealthRow, gain, health_rows, sample_scores, verdict
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.step_times import StepTimes, step_times
from tinkerscript.lifecycle import ProcessId
from tinkerscript.page.annotation import Annotation, read_annotation
from tinkerscript.page.curves import metric_names
from tinkerscript.page.lines import EpisodeLine, lines, newest

NEWEST = 12
RECENT_STEPS = 50  # To estimate the remaining time.

EVALUATIONS = 20

State = Literal["running", "finished", "stopped", "failed"]


class CurrentWait(BaseModel):
    what: str
    since: float = Field(description="Unix time in seconds.")


class PhaseProgress(BaseModel):
    label: str
    done: int
    total: int = Field(description="0 if unknown because clients register the samples.")


class EvaluationProgress(BaseModel):
    """An unfinished evaluation, which a resumed run makes again."""

    label: str
    step: int
    done: int = Field(description="Episodes that have ended.")
    total: int


class Evaluation(BaseModel):
    label: str
    step: int
    time: float
    policy_version: int
    score: float | None
    accepted: int
    failed: int


class FailureCount(BaseModel):
    kind: str
    count: int
    example: EpisodeLine | None = Field(description="The newest one.")


class Health(BaseModel):
    """Figures over the whole run."""

    episodes: int = Field(description="Training episodes with a result.")
    failed: int
    failures: list[FailureCount]
    retried: int
    rows: list[HealthRow] = Field(description="What was checked over the last steps; empty before the first.")
    verdict: str = Field(description="Such as `all well` and `needs attention: reply length`.")


class Note(BaseModel):
    time: float
    text: str


class RunLine(Annotation):
    name: str
    state: State
    method: str
    model: str
    learning_rate: float | None
    tasks: list[str]
    failure: str = Field(description="Why it failed; empty otherwise.")
    step: int
    steps: int
    began: float
    updated: float
    score_before: float | None = Field(description="Score of the first of several evaluations.")
    score: float | None = Field(description="Score of the newest evaluation.")
    reward: float | None


class RunView(RunLine):
    folder: str
    time_left_s: float | None
    waiting: CurrentWait | None
    phase: PhaseProgress | None
    evaluations: list[Evaluation] = Field(description="The first one and the newest ones, in order.")
    pending: list[EvaluationProgress]
    times: StepTimes | None = Field(description="How the time of the last steps was divided.")
    gain: Gain | None = Field(description="Gain of the last evaluation over the first, sample by sample.")
    health: Health
    newest: list[EpisodeLine]
    notes: list[Note]
    recording: str
    policy_version: int | None
    episodes: int = Field(description="Number of episodes that ended, including evaluations.")


def run_line(name: str, ledger: LedgerReader) -> RunLine:
    return RunLine.model_validate(_line(name, ledger, ledger.status()))


class RunList(BaseModel):
    runs: list[RunLine]
    version: str = Field(description="Version of tinkerscript.")


def run_list(ledgers: Mapping[str, LedgerReader]) -> RunList:
    runs = [run_line(name, ledger) for name, ledger in ledgers.items()]
    return RunList(runs=sorted(runs, key=lambda line: -line.began), version=__version__)


def _line(name: str, ledger: LedgerReader, status: dict[str, Any]) -> dict[str, Any]:
    first = ledger.row("SELECT label, score FROM evaluations WHERE undone = 0 ORDER BY step, time LIMIT 1")
    last = ledger.row(
        "SELECT label, score FROM evaluations WHERE undone = 0 ORDER BY step DESC, time DESC LIMIT 1"
    )
    return {
        **read_annotation(ledger.folder).model_dump(),
        "name": name,
        "state": state(status),
        "method": ledger.config.get("method", ""),
        "model": ledger.model(),
        "learning_rate": _learning_rate(ledger),
        "tasks": _tasks(ledger),
        "failure": status.get("failure", ""),
        "step": status.get("step", 0),
        "steps": status.get("steps", 0),
        "began": status.get("began", 0.0),
        "updated": _updated(ledger, status),
        "score_before": first["score"] if first and last and first["label"] != last["label"] else None,
        "score": last and last["score"],
        "reward": newest_value(ledger, "reward/mean"),
    }


def _tasks(ledger: LedgerReader) -> list[str]:
    several = ledger.config.get("tasks") or [ledger.config.get("task")]
    named = [cast("dict[str, Any]", each).get("name") for each in several if isinstance(each, dict)]
    return [str(name) for name in named if name]


def _learning_rate(ledger: LedgerReader) -> float | None:
    # The trainer may have chosen it.
    section = "sft" if ledger.config.get("method") == "sft" else "training"
    said = ledger.setting(section, "learning_rate")
    return said if isinstance(said, float) and said else newest_value(ledger, "train/learning_rate")


def overview(name: str, ledger: LedgerReader) -> RunView:
    status = ledger.status()
    line = _line(name, ledger, status)
    live = line["state"] == "running"
    phase = status.get("phase") if live else None
    evaluated = evaluations(ledger, newest=EVALUATIONS)
    return RunView(
        **line,
        folder=str(ledger.folder),
        time_left_s=_time_left_s(ledger, status) if live else None,
        waiting=_waiting(status) if live else None,
        phase=PhaseProgress.model_validate(phase) if phase else None,
        evaluations=evaluated,
        times=step_times(ledger),
        pending=[EvaluationProgress.model_validate(each) for each in status.get("pending", ())],
        gain=_gain(ledger, evaluated),
        health=health(ledger),
        newest=newest(ledger, limit=NEWEST).episodes,
        notes=[
            Note(time=row[0], text=row[1])
            for row in ledger.rows("SELECT time, text FROM notes ORDER BY number DESC LIMIT 20")
        ],
        recording=str(ledger.config.get("recording", "")),
        policy_version=_int(ledger.number("SELECT max(policy_version) FROM steps WHERE undone = 0")),
        episodes=int(ledger.number("SELECT coalesce(max(end_number), 0) FROM episodes") or 0),
    )


def _waiting(status: dict[str, Any]) -> CurrentWait | None:
    what = status.get("waiting_for")
    return CurrentWait(what=what, since=status.get("waiting_since", 0.0)) if what else None


def state(status: dict[str, Any]) -> State:
    """The last report, or "stopped" if the trainer is gone."""
    said: State = status.get("state", "stopped")
    if said == "running" and "process" in status and ProcessId(*status["process"]).is_gone():
        return "stopped"
    return said


def evaluations(ledger: LedgerReader, *, newest: int | None = None) -> list[Evaluation]:
    columns = "label, step, time, policy_version, score, accepted, failed"
    query = f"SELECT {columns} FROM evaluations WHERE undone = 0 ORDER BY step, time"
    rows = ledger.rows(query)
    kept = rows if newest is None or len(rows) <= newest else [rows[0], *rows[-newest:]]
    return [Evaluation.model_validate(dict(row)) for row in kept]


def _gain(ledger: LedgerReader, evaluated: list[Evaluation]) -> Gain | None:
    if len(evaluated) < 2:
        return None
    first, last = (
        sample_scores(ledger, step=each.step, label=each.label) for each in (evaluated[0], evaluated[-1])
    )
    return gain(first, last)


def health(ledger: LedgerReader) -> Health:
    rows = health_rows(ledger)
    return Health(
        episodes=int(_total(ledger, "episodes/accepted")),
        failed=int(_total(ledger, "episodes/failed")),
        failures=_failures(ledger),
        retried=int(_total(ledger, "episodes/retried")),
        rows=rows,
        verdict=verdict(rows),
    )


def _failures(ledger: LedgerReader) -> list[FailureCount]:
    found: list[FailureCount] = []
    for name in metric_names(ledger, "failure/"):
        kind = name.removeprefix("failure/")
        found.append(FailureCount(kind=kind, count=int(_total(ledger, name)), example=_example(ledger, kind)))
    return sorted(found, key=lambda failure: -failure.count)


def _example(ledger: LedgerReader, kind: str) -> EpisodeLine | None:
    found = lines(ledger, "e.state = 'failed' AND e.failure = ? ORDER BY e.end_number DESC", (kind,), limit=1)
    return found[0] if found else None


_VALUES = "SELECT {what} FROM metrics WHERE name = ? AND undone = 0"


def _total(ledger: LedgerReader, name: str) -> float:
    return ledger.number(_VALUES.format(what="coalesce(sum(value), 0)"), (name,)) or 0.0


def newest_value(ledger: LedgerReader, name: str) -> float | None:
    return ledger.number(_VALUES.format(what="value") + " ORDER BY step DESC LIMIT 1", (name,))


def _updated(ledger: LedgerReader, status: dict[str, Any]) -> float:
    last = (
        ledger.number(
            "SELECT ended_at FROM episodes WHERE end_number IS NOT NULL ORDER BY end_number DESC LIMIT 1"
        )
        or 0.0
    )
    return max(last, status.get("last_step", 0.0), status.get("began", 0.0), status.get("waiting_since", 0.0))


def _time_left_s(ledger: LedgerReader, status: dict[str, Any]) -> float | None:
    query = f"SELECT step, time FROM steps WHERE undone = 0 ORDER BY step DESC LIMIT {RECENT_STEPS}"
    rows = [row for row in ledger.rows(query) if row["time"] >= status.get("began", 0.0)]
    if len(rows) < 2:
        return None
    first, last = ((row["step"], row["time"]) for row in (rows[-1], rows[0]))
    return time_left_s(status.get("steps", 0), first, last, time.time())


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
EVENT_EVERY_S = 15.0
"""After this much silence, a comment keeps the connection open."""


class RunEvents:
    def __init__(self, run: str, ledger: LedgerReader) -> None:
        self._run = run
        self._ledger = ledger
        self._streams = 0
        self._looking: asyncio.Task[None] | None = None
        self._event = b""
        self._changed = asyncio.Event()

    async def stream(self, is_disconnected: Callable[[], Awaitable[bool]]) -> AsyncGenerator[bytes]:
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
            except TinkerScriptError as error:  # The folder may come back.
                logger.warning("page.look_failed %s: %s", self._run, error)
                event = self._event
            if event != self._event:
                self._event = event
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(LOOK_EVERY_S)

    def _read(self) -> bytes:
        return b"event: run\ndata: " + overview(self._run, self._ledger).model_dump_json().encode() + b"\n\n"
