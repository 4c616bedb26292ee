"""`RecordSender`: sends the record of a run to a server that does not share its folder.

The server says which rows it has, and gets those after them, batch by batch; what is lost on the way, or with
either end, is sent again from there.

Invariants: one piece of at most `PART_BYTES` is on the link at a time, and after each batch there is a pause
as long as it took, so that samples and results wait at most for one piece. No run depends on it: what cannot
be sent is said once, and the run goes on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec

from tinkerscript.errors import ConfigError, LinkError
from tinkerscript.record.rows import Marks, RowBatch, pack_batch, read_batch
from tinkerscript.record.schema import RECORD_FILE, open_for_reading
from tinkerscript.train.recorder import RunRecorder
from tinkerscript.trainer_link.messages import OfferRecord, RecordPart, RecordState
from tinkerscript.trainer_link.trainer_end import TrainerLink

PART_BYTES = 64 * 1024

LOOK_EVERY_S = 1.0
"""Between two looks for new rows, once the server has all."""

KEEP_ALIVE_S = 10.0
"""After which something is sent even if nothing is new."""

OFFER_AGAIN_S = 60.0
"""After the server has said why it does not take the record."""

STOPPED_S, FAILED_S = 1.5, 10.0
"""How long a run that was stopped, or failed, goes on sending."""

SLOW_END_S = 3.0
"""After which a finished run says what it waits for."""


@asynccontextmanager
async def record_sent(
    link: TrainerLink, recorder: RunRecorder, folder: Path, *, limit_mb: int, note: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Send the record in `folder`, which `recorder` writes, while the context is open; a run that finishes in
    it leaves when the server has all. `limit_mb`: of the record. `note` is told what a person should know."""
    sender = RecordSender(link, recorder, folder / RECORD_FILE, limit_mb=limit_mb, note=note)
    sending = asyncio.create_task(sender.run(), name="send the record")
    patience_s: float | None = STOPPED_S
    try:
        with recorder.saying_how_it_ends():
            yield
        patience_s = None
    except Exception:
        patience_s = FAILED_S
        raise
    finally:
        await _finish(sender, sending, patience_s, note)


async def _finish(
    sender: RecordSender, sending: asyncio.Task[None], patience_s: float | None, note: Callable[[str], None]
) -> None:
    sender.finishing.set()
    try:
        soon = SLOW_END_S if patience_s is None else patience_s
        await asyncio.wait([sending], timeout=soon)
        if patience_s is None and not sending.done():
            note("the run is finished; the server gets the rest of its record (Ctrl-C leaves at once)")
            await asyncio.wait([sending])
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


class RecordSender:
    """`run` sends until `finishing` is set and the server has all."""

    def __init__(
        self,
        link: TrainerLink,
        recorder: RunRecorder,
        path: Path,
        *,
        limit_mb: int,
        note: Callable[[str], None],
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self.finishing = asyncio.Event()
        """Set it when the run ends."""

        self.bytes_sent = 0
        self._link = link
        self._recorder = recorder
        self._path = path
        self._limit_mb = limit_mb
        self._note = note
        self._look_every_s = look_every_s
        self._batches = 0
        self._facts: dict[str, str] = {}
        """Those of the record that the server has."""

        self._told = ""

    async def run(self) -> None:
        """Offer the record, and send what the server lacks; again and again."""
        try:
            while not await self._sent_all():
                pass
        except (ConfigError, LinkError, sqlite3.Error, OSError) as error:
            self._tell(f"the server's page does not follow this run any more: {error}")

    async def _sent_all(self) -> bool:
        """Whether nothing is left to do; False if the record is to be offered again."""
        await asyncio.to_thread(self._recorder.flush)
        with closing(await asyncio.to_thread(open_for_reading, self._path)) as record:
            try:
                state = await self._link.ask_about_record(_offer(record, self._recorder, self._limit_mb))
            except TimeoutError:
                return self._gives_up()
            assert isinstance(state, RecordState)
            if state.problem:
                self._tell(f"the server's page does not follow this run: {state.problem}")
                return await self._ends_within(OFFER_AGAIN_S)
            return state.is_shared or await self._send_rows(record, state)

    async def _send_rows(self, record: sqlite3.Connection, state: RecordState) -> bool:
        """Until the end of the run, or of this offer."""
        self._facts = {}
        silent_since = time.monotonic()
        while state.marks and not state.problem:
            marks = msgspec.msgpack.decode(state.marks, type=Marks)
            _check_same_record(record, marks)
            batch = await asyncio.to_thread(self._next, record, marks)
            if batch.is_empty():
                if self.finishing.is_set():
                    return True
                if time.monotonic() - silent_since < KEEP_ALIVE_S:
                    await self._ends_within(self._look_every_s)
                    continue
            began = time.monotonic()
            try:
                state = await self._send(batch)
            except TimeoutError:
                return self._gives_up()
            silent_since = time.monotonic()
            if state.marks:
                self._facts |= batch.facts
            await self._ends_within(silent_since - began)
        if state.problem:
            self._tell(f"the server's page does not follow this run any more: {state.problem}")
            return await self._ends_within(OFFER_AGAIN_S)
        return False

    def _next(self, record: sqlite3.Connection, marks: Marks) -> RowBatch:
        if self.finishing.is_set():
            self._recorder.flush()
        return read_batch(record, marks, self._facts)

    async def _send(self, batch: RowBatch) -> RecordState:
        """Returns what the server has then. Raises TimeoutError."""
        data = await asyncio.to_thread(pack_batch, batch)
        self._batches += 1
        starts = range(0, len(data), PART_BYTES)
        for number, start in enumerate(starts):
            part = RecordPart(
                session=self._recorder.session,
                batch=self._batches,
                part=number,
                is_last=number == len(starts) - 1,
                data=data[start : start + PART_BYTES],
            )
            answer = await self._link.ask_about_record(part)
            self.bytes_sent += len(part.data)
            if isinstance(answer, RecordState):
                return answer
        raise LinkError("the server does not answer the last part of a batch as one")

    def _gives_up(self) -> bool:
        """The server did not answer: a run that has ended does not ask it again."""
        if self.finishing.is_set():
            self._tell("the server does not answer, and lacks the end of this run's record")
        return self.finishing.is_set()

    async def _ends_within(self, seconds: float) -> bool:
        """Wait; whether the run ends meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self.finishing.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._note(text)


def _offer(record: sqlite3.Connection, recorder: RunRecorder, limit_mb: int) -> OfferRecord:
    """Raises ConfigError for a record that its writer has given up."""
    first = record.execute("SELECT session FROM resumes WHERE number = 1").fetchone()
    if first is None:
        raise ConfigError("its record cannot be written")
    return OfferRecord(session=recorder.session, identity=first[0], limit_mb=limit_mb)


def _check_same_record(record: sqlite3.Connection, marks: Marks) -> None:
    """Raises ConfigError if the server has rows of another continuation of the run."""
    row = record.execute("SELECT session FROM resumes WHERE number = ?", (marks.resumes,)).fetchone()
    if marks.resumes and (row is None or row[0] != marks.session):
        raise ConfigError("it has followed another continuation of this run, from a copy of its folder")
