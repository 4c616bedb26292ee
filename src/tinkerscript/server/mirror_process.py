"""`MirrorProcess`: passes what a trainer elsewhere sends of its record to a child process, which writes it.

A record is unpacked, checked and written in the child: none of it takes time of the event loop, and what
breaks it breaks only the mirror.

Invariants: at most `MAX_WAITING` messages wait; one is with the child at a time; a trainer that shares the
run's folder is told so, and no child is started; none outlives the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path

from tinkerscript.errors import ConfigError, InterchangeError, LinkError
from tinkerscript.lifecycle import describe_exit, own_command
from tinkerscript.record.reader import Record
from tinkerscript.server.page_child import ask_to_stop, stop_page
from tinkerscript.trainer_link.framing import frames, read_to_trainer
from tinkerscript.trainer_link.messages import OfferRecord, RecordPart, RecordState, Tagged

MAX_WAITING = 4
"""A trainer sends the next message after the answer to the last."""

MAX_PART_BYTES = 2**20

ANSWER_S = 120.0
"""Seconds that the child may take for one message."""

PAUSE_S = 5.0
"""Seconds after a child that broke in which none is started."""

TOKENS = "TINKERSCRIPT_"
"""What variables with secrets begin with, which the child does not need."""

logger = logging.getLogger(__name__)


class MirrorProcess:
    """The mirror in the run's folder. For one event loop; `run` owns the child."""

    def __init__(
        self, run_dir: Path, *, send: Callable[[Tagged], None], withheld: Collection[str] = ()
    ) -> None:
        """`send`: sends an answer to the trainer. `withheld`: variables that the child does not get."""
        self._run_dir = run_dir
        self._withheld = withheld
        self._send = send
        self._waiting: asyncio.Queue[OfferRecord | RecordPart] = asyncio.Queue(maxsize=MAX_WAITING)
        self._child: Process | None = None
        self._broke_at = -PAUSE_S

    def put(self, message: OfferRecord | RecordPart) -> bool:
        """Take a message of the trainer; False if it is dropped. What was dropped is offered again."""
        if self._waiting.full() or (isinstance(message, RecordPart) and len(message.data) > MAX_PART_BYTES):
            return False
        self._waiting.put_nowait(message)
        return True

    async def run(self) -> None:
        """Answer the trainer until cancelled, then end the child."""
        try:
            while True:
                message = await self._waiting.get()
                try:
                    await self._answer(message)
                except (OSError, InterchangeError, asyncio.IncompleteReadError, TimeoutError) as error:
                    await self._give_up(error)
        finally:
            if self._child is not None:
                await asyncio.shield(stop_page(self._child))

    async def _answer(self, message: OfferRecord | RecordPart) -> None:
        if isinstance(message, OfferRecord) and await asyncio.to_thread(self._is_shared, message.session):
            self._send(RecordState(session=message.session, is_shared=True))
            return
        if self._child is None and isinstance(message, RecordPart):
            self._send(RecordState(session=message.session, batch=message.batch))
            return
        if self._child is None:
            await asyncio.sleep(max(0.0, self._broke_at + PAUSE_S - time.monotonic()))
            self._child = await self._start()
        async with asyncio.timeout(ANSWER_S):
            self._send(await _ask(self._child, message))

    def _is_shared(self, session: str) -> bool:
        try:
            with closing(Record(self._run_dir)) as record:
                return record.is_written_by(session)
        except (ConfigError, sqlite3.Error):  # There is none, or the child says what is wrong with it.
            return False

    async def _start(self) -> Process:
        path = self._run_dir / "logs" / "mirror.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(TOKENS) and name not in self._withheld
        }
        with path.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *own_command("mirror", "--run-dir", str(self._run_dir)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                start_new_session=True,
                env=environ,
            )
        logger.info("mirror.started pid=%d log=%s", child.pid, path)
        return child

    async def _give_up(self, error: Exception) -> None:
        """End a child that broke. The trainer offers its record again, and another one goes on."""
        self._broke_at = time.monotonic()
        child, self._child = self._child, None
        ended = "it was not started"
        if child is not None:
            ask_to_stop(child)
            await asyncio.shield(stop_page(child))
            ended = describe_exit(child.returncode or 0)
        logger.warning("mirror.broke %s error=%r", ended, error)


async def _ask(child: Process, message: OfferRecord | RecordPart) -> Tagged:
    """Pass a message on; returns the answer. A frame is preceded by its length, 4 bytes, big-endian."""
    assert child.stdin is not None
    assert child.stdout is not None
    for frame in frames([message]):
        child.stdin.write(len(frame).to_bytes(4, "big") + frame)
    await child.stdin.drain()
    length = int.from_bytes(await child.stdout.readexactly(4), "big")
    try:
        (answer,) = read_to_trainer(await child.stdout.readexactly(length))
    except (LinkError, ValueError) as error:
        raise InterchangeError(f"the mirror's answer cannot be read: {error}") from error
    return answer
