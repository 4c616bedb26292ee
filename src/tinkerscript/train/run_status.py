"""`RunStatus` writes a run's progress and messages into its ledger for the page and `show`.

Training never depends on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tinkerscript.dashboard.progress import PendingEvaluation, Phase, ProgressReporter
from tinkerscript.errors import LinkError, StoreError
from tinkerscript.ledger.history import RowWriter
from tinkerscript.ledger.reader import STATUS
from tinkerscript.ledger.rows import FactRow, NoteRow
from tinkerscript.lifecycle import ProcessId

logger = logging.getLogger(__name__)

SAID_EVERY_S = 0.2

LAST_WORDS_S = 2.0


class RunStatus(ProgressReporter):
    def __init__(self, shown: ProgressReporter) -> None:
        self._shown = shown
        self._said: dict[str, Any] = {
            "state": "running",
            "process": ProcessId.own(),
            "failure": "",
            "phase": None,
            "waiting_for": "",
            "waiting_since": 0.0,
            "began": time.time(),
        }
        self._waits: list[str] = []
        self._notes: list[NoteRow] = []
        self._ledger: RowWriter | None = None
        self._writing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def write_into(self, ledger: RowWriter) -> None:
        self._ledger = ledger
        ledger.note(self._notes)
        self._notes = []
        self._writing = asyncio.create_task(self._write(ledger), name="run status")

    async def _write(self, ledger: RowWriter) -> None:
        try:
            while True:
                await ledger.commit([self._row()])
                await asyncio.sleep(SAID_EVERY_S)
                await self._changed.wait()
        except (LinkError, StoreError) as error:  # What needs the ledger fails by itself.
            logger.warning("status.not_written %s", error)

    def _row(self) -> FactRow:
        self._changed.clear()
        return FactRow(name=STATUS, value=json.dumps(self._said).encode())

    async def end(self, error: BaseException | None) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is None:
            return
        assert self._writing is not None
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        stopped = error is not None and not isinstance(error, Exception)
        self._say(
            state="stopped" if stopped else "failed" if error else "finished",
            failure=f"{type(error).__name__}: {error}" if error and not stopped else "",
        )
        with suppress(LinkError, StoreError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await ledger.commit([self._row()])

    async def exited(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end(error)

    def _say(self, **values: Any) -> None:
        self._said |= values
        self._changed.set()

    # What the run shows

    def begin(self, steps: int, *, done: int = 0) -> None:
        self._say(steps=steps, step=done)
        self._shown.begin(steps, done=done)

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        self._waits.append(what)
        self._say_wait()
        try:
            with self._shown.waiting(what):
                yield
        finally:
            self._waits.pop()
            self._say_wait()

    def _say_wait(self) -> None:
        self._say(waiting_for=self._waits[-1] if self._waits else "", waiting_since=time.time())

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        with self._shown.phase(label, total=total) as shown:
            phase = _ToldPhase(shown, self, label, total)
            phase.advance(0)
            try:
                yield phase
            finally:
                self._say(phase=None)

    def say_phase(self, label: str, done: int, total: int) -> None:
        self._say(phase={"label": label, "done": done, "total": total, "time": time.time()})

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._say(step=step, last_step=time.time())
        self._shown.step(step, metrics)

    def pending(self, evaluations: Sequence[PendingEvaluation]) -> None:
        self._say(pending=[each._asdict() for each in evaluations])

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        self._shown.evaluation(label, score, episodes, failed)

    def note(self, message: str) -> None:
        row = NoteRow(time=time.time(), text=message)
        if self._ledger is not None:
            self._ledger.note([row])
        else:
            self._notes.append(row)
        self._shown.note(message)


@dataclass
class _ToldPhase(Phase):
    shown: Phase
    status: RunStatus
    label: str
    total: int
    done: int = 0

    def advance(self, episodes: int) -> None:
        self.done += episodes
        self.status.say_phase(self.label, self.done, self.total)
        if episodes:
            self.shown.advance(episodes)
