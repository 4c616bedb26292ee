"""Notes the long turns of an event loop. Python imports it by itself where this folder is in PYTHONPATH.

A timer of a millisecond runs in each turn of the loop: what the loop's thread has computed since the turn
before is how long everything else waited, whatever other processes take of the machine. Turns of more than
`NOTED_S` become lines of the file `LOOP_NOTES`: the process, the time, the turn, by the processor's time and
by the clock, and the garbage collector's part of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Coroutine
from typing import Any

EVERY_S = 0.001
NOTED_S = 0.001


class LoopNotes:
    """Of the loop that it is made in."""

    def __init__(self, path: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - as long as the process
        self._collecting = self._collected = 0.0
        gc.callbacks.append(self._garbage)
        self._before, self._since = time.thread_time(), time.perf_counter()
        self._turn()

    def _garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._collected += time.thread_time() - self._collecting

    def _turn(self) -> None:
        used = time.thread_time() - self._before
        if used > NOTED_S:
            note = {
                "process": sys.argv[1:2],
                "at": time.time(),
                "cpu_ms": 1e3 * used,
                "wall_ms": 1e3 * (time.perf_counter() - self._since),
                "gc_ms": 1e3 * self._collected,
            }
            self._file.write(json.dumps(note) + "\n")
            self._file.flush()
        self._collected = 0.0
        self._before, self._since = time.thread_time(), time.perf_counter()
        self._loop.call_later(EVERY_S, self._turn)


def _watch(path: str) -> None:
    run = asyncio.Runner.run

    def watched(self: asyncio.Runner, coro: Coroutine[Any, Any, Any], **options: Any) -> Any:
        async def main() -> Any:
            notes = LoopNotes(path)
            try:
                return await coro
            finally:
                del notes

        return run(self, main(), **options)

    asyncio.Runner.run = watched  # type: ignore[method-assign]


if "LOOP_NOTES" in os.environ:
    _watch(os.environ["LOOP_NOTES"])
