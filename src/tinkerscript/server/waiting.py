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


class Signal:
    """Wakes everybody who waits now; remembers nothing."""

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
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class Wake(NamedTuple):
    """Why a waiting client was woken."""

    episode_type: EpisodeType
    before: int
    """Only clients whose ticket is smaller are woken in its stead; a chain of wakes ends."""


class WaitingLine:
    """Clients that wait for an episode, in the order of their arrival."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._lines: dict[ClaimType, OrderedDict[int, asyncio.Future[Wake | None]]] = {
            "train": OrderedDict(),
            "eval": OrderedDict(),
            "any": OrderedDict(),
        }

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def notify(self, episode_type: EpisodeType) -> None:
        """An episode became claimable: wake the client that has waited longest for one."""
        self.pass_on(Wake(episode_type, next(self._tickets)))

    def notify_all(self) -> None:
        """Everybody is to look again."""
        for line in self._lines.values():
            for future in line.values():
                if not future.done():
                    future.set_result(None)
            line.clear()

    def pass_on(self, wake: Wake) -> bool:
        """Wake the next client in the stead of one that could not use it; False if there is none."""
        lines = [line for line in (self._lines[wake.episode_type], self._lines["any"]) if line]
        if not lines:
            return False
        line = min(lines, key=lambda candidate: next(iter(candidate)))
        if next(iter(line)) >= wake.before:
            return False
        _, future = line.popitem(last=False)
        if future.done():
            return self.pass_on(wake)
        future.set_result(wake)
        return True

    async def wait(self, claim_type: ClaimType, timeout_s: float) -> Wake | None:
        """Return when it may be worth to claim again; None if nobody was woken in this client's stead.

        Raises TimeoutError. A wake that comes together with a cancellation is passed on.
        """
        ticket = next(self._tickets)
        future: asyncio.Future[Wake | None] = asyncio.get_running_loop().create_future()
        self._lines[claim_type][ticket] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except (TimeoutError, asyncio.CancelledError):
            wake = future.result() if future.done() and not future.cancelled() else None
            if wake is not None:
                self.pass_on(wake)
            raise
        finally:
            self._lines[claim_type].pop(ticket, None)
