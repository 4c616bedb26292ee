"""`RunEvents`: the first screen of a run, sent to everybody who looks when it changes.

Invariant: one look at the record a second serves all streams of a run, and there is none without streams.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable

from tinkerscript.errors import TinkerScriptError
from tinkerscript.page.overview import overview
from tinkerscript.record.reader import Record

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
