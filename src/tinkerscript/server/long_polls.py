"""Waiting for something to happen, without polling: `Signal`, and the line of clients that long-poll.

Invariant: an episode that becomes claimable wakes one waiting client that may claim it, the one that has
waited longest; a wake that is not used is passed on, so that no episode lies idle while somebody waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from typing import NamedTuple

from tinkerscript.protocol import ClaimType, EpisodeType
from tinkerscript.server.episodes.indexes import RequestKey


class Wake(NamedTuple):
    """Why a waiting client was woken."""

    pool: str
    episode_type: EpisodeType
    before: int
    """Only clients whose ticket is smaller are woken in its stead; a chain of wakes ends."""


_Line = OrderedDict[int, asyncio.Future[Wake | None]]


class LongPollQueue:
    """Clients that wait for an episode of a pool, in the order of their arrival."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._lines: dict[tuple[str, ClaimType], _Line] = {}
        """Only lines in which somebody stands."""

        self._copies: dict[RequestKey, set[asyncio.Future[Wake | None]]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def notify(self, pool: str, episode_type: EpisodeType) -> None:
        """An episode became claimable: wake the client that has waited longest for one."""
        self.pass_on(Wake(pool, episode_type, next(self._tickets)))

    def notify_all(self) -> None:
        """Everybody is to look again."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            for future in line.values():
                _wake(future)

    def answered(self, request: RequestKey) -> None:
        """A request was answered: its other copies in the line are to look again."""
        for future in self._copies.get(request, ()):
            _wake(future)

    def pass_on(self, wake: Wake) -> bool:
        """Wake the next client in the stead of one that could not use it; False if there is none."""
        keys: list[tuple[str, ClaimType]] = [(wake.pool, wake.episode_type), (wake.pool, "any")]
        first = min(((next(iter(self._lines[key])), key) for key in keys if key in self._lines), default=None)
        if first is None or first[0] >= wake.before:
            return False
        ticket, key = first
        future = self._leave(key, ticket)
        if future is None or future.done():
            return self.pass_on(wake)
        future.set_result(wake)
        return True

    async def wait(
        self, pool: str, claim_type: ClaimType, timeout_s: float, request: RequestKey | None = None
    ) -> Wake | None:
        """Return when it may be worth to claim again; None if nobody was woken in this client's stead.

        `request` names what `answered` wakes. Raises TimeoutError. A wake that comes together with a
        cancellation is passed on.
        """
        ticket = next(self._tickets)
        future: asyncio.Future[Wake | None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault((pool, claim_type), OrderedDict())[ticket] = future
        if request is not None:
            self._copies.setdefault(request, set()).add(future)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except (TimeoutError, asyncio.CancelledError):
            wake = future.result() if future.done() and not future.cancelled() else None
            if wake is not None:
                self.pass_on(wake)
            raise
        finally:
            self._leave((pool, claim_type), ticket)
            if request is not None:
                self._forget_copy(request, future)

    def _leave(self, key: tuple[str, ClaimType], ticket: int) -> asyncio.Future[Wake | None] | None:
        """Take a ticket out of its line; nothing is kept of a line in which nobody stands."""
        line = self._lines.get(key)
        if line is None:
            return None
        future = line.pop(ticket, None)
        if not line:
            del self._lines[key]
        return future

    def _forget_copy(self, request: RequestKey, future: asyncio.Future[Wake | None]) -> None:
        copies = self._copies[request]
        copies.discard(future)
        if not copies:
            del self._copies[request]


def _wake(future: asyncio.Future[Wake | None]) -> None:
    if not future.done():
        future.set_result(None)
