"""`Renewals`: keeps the leases of running claims alive, with one asyncio task for all of them.

Invariant: a claim is renewed from `holding` until that block ends, at most `AT_ONCE` requests at a time; a
claim that the server calls lost is renewed no more, and whoever holds it is told once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

from tinkerscript.client.episode import Episode
from tinkerscript.client.exchange import Timing
from tinkerscript.client.operations import interval_s
from tinkerscript.errors import ClientError
from tinkerscript.protocol import CanContinueEpisodeResponse

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Heartbeats on their way at most."""


class Held:
    """One claim that is renewed."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.on_lost: Callable[[], None] | None = None
        """Called on the event loop when a heartbeat learns that the claim is lost."""

        self.is_open = True
        self.timer: asyncio.TimerHandle | None = None
        self.beat: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def cancelling_the_block(self) -> AsyncGenerator[None]:
        """Cancel this block when a heartbeat learns that the claim is lost; it raises ClaimLostError then."""
        scope = asyncio.timeout(None)  # A scope that cancels its block, and knows it was not somebody else.
        try:
            async with scope:
                self.on_lost = lambda: scope.reschedule(0.0)
                try:
                    yield
                finally:
                    self.on_lost = None
        except TimeoutError:
            if not scope.expired():
                raise
        if scope.expired():
            self.episode.check()

    def close(self) -> None:
        """No further heartbeat, and nobody to tell."""
        self.is_open = False
        if self.timer is not None:
            self.timer.cancel()
        if self.beat is not None:
            self.beat.cancel()


class Renewals:
    """Renews the claims that are held. `run` does the work and owns every request."""

    def __init__(
        self,
        heartbeat: Callable[[Episode], Awaitable[CanContinueEpisodeResponse]],
        timing: Timing | None = None,
    ) -> None:
        """`heartbeat` renews one claim, and marks the lease of one that is lost."""
        self._heartbeat = heartbeat
        self._timing = timing or Timing()
        self._due: asyncio.Queue[Held] = asyncio.Queue()
        """No longer than the claims that are held."""

        self._slots = asyncio.Semaphore(AT_ONCE)

    @contextmanager
    def holding(self, episode: Episode) -> Generator[Held]:
        """Renew `episode` while this block runs. On the event loop of `run`."""
        held = Held(episode)
        self._schedule(held)
        try:
            yield held
        finally:
            held.close()

    async def run(self) -> None:
        """Renew what is due, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                held = await self._due.get()
                await self._slots.acquire()
                if held.is_open:
                    held.beat = tasks.create_task(self._renew(held))
                    held.beat.add_done_callback(lambda _: self._slots.release())
                else:
                    self._slots.release()

    def _schedule(self, held: Held) -> None:
        delay_s = interval_s(held.episode, self._timing)
        held.timer = asyncio.get_running_loop().call_later(delay_s, self._due.put_nowait, held)

    async def _renew(self, held: Held) -> None:
        episode = held.episode
        try:
            await self._heartbeat(episode)
        except ClientError as error:
            logger.warning("episode %s could not be renewed; trying again: %s", episode.episode_uuid, error)
        if not held.is_open:
            return
        if not episode.lease.is_over:
            self._schedule(held)
        elif episode.lost and held.on_lost is not None:
            held.on_lost()
