"""On `PYTHONPATH`, lets every process with an event loop say how long the loop was busy between two turns.

Each process appends a line a second to a file of its own in `LOOP_PROBE`: the wall time, and the most
processor time of the loop's thread between two ticks 1 ms apart. A tick waits for whatever runs, so no stall
is longer than that.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from typing import Any

TICK_S = 0.001
WARM_UP_S = 2.0

FOLDER = os.environ.get("LOOP_PROBE", "")


async def watch() -> None:
    await asyncio.sleep(WARM_UP_S)  # Imports and the model's tokenizer: nothing is served yet.
    last, longest, written = time.thread_time(), 0.0, time.time()
    with open(f"{FOLDER}/{os.getpid()}", "a", buffering=1) as file:  # noqa: ASYNC230
        while True:
            await asyncio.sleep(TICK_S)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
            if time.time() - written >= 1.0:
                written = time.time()
                file.write(f"{written} {longest}\n")
                longest = 0.0


def probed_run(run: Any) -> Any:
    def wrapped(self: asyncio.Runner, work: Coroutine[Any, Any, Any], **options: Any) -> Any:
        async def watched() -> Any:
            watching = asyncio.create_task(watch())
            try:
                return await work
            finally:
                watching.cancel()

        return run(self, watched(), **options)

    return wrapped


if FOLDER:
    asyncio.Runner.run = probed_run(asyncio.Runner.run)
