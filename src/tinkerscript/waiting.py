"""`Signal`: waiting for an event without polling."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes every task that is waiting now. Remembers nothing: a later `wait` waits for the next `fire`."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def wait(self) -> None:
        """Return at the next `fire`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def fire(self) -> None:
        """Wake the waiting tasks."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
