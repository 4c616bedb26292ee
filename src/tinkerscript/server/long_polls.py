"""`LongPollQueue`: clients whose claim request waits for an episode.

Invariant: an episode that becomes claimable wakes one client that may claim it, the one that has waited
longest. A client that cannot use its wake-up passes it on, so that no episode stays idle while a client waits
for one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from typing import NamedTuple

from tinkerscript.protocol import ClaimType, EpisodeType
from tinkerscript.server.episodes.indexes import RequestKey


class Wakeup(NamedTuple):
    """Tells a waiting client that an episode became claimable."""

    pool: str
    episode_type: EpisodeType
    before: int
    """It may be passed on only to clients with a smaller ticket, so that a chain of wake-ups ends."""


_Waiting = asyncio.Future[Wakeup | None]
_Queue = OrderedDict[int, _Waiting]
"""Ticket -> waiting client, in order of arrival."""


class LongPollQueue:
    """Clients that wait for an episode: a queue for each pool and claim type, in order of arrival."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._queues: dict[tuple[str, ClaimType], _Queue] = {}
        """Without empty queues."""

        self._copies: dict[RequestKey, set[_Waiting]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def notify(self, pool: str, episode_type: EpisodeType) -> None:
        """Wake the client that has waited longest for such an episode: one became claimable."""
        self.pass_on(Wakeup(pool, episode_type, next(self._tickets)))

    def notify_all(self) -> None:
        """Let every waiting client try again."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            for client in queue.values():
                _wake(client)

    def answered(self, request: RequestKey) -> None:
        """Let the waiting copies of an answered request try again."""
        for client in self._copies.get(request, ()):
            _wake(client)

    def pass_on(self, wakeup: Wakeup) -> bool:
        """Pass an unused wake-up on to the next client; False if there is none."""
        keys: list[tuple[str, ClaimType]] = [(wakeup.pool, wakeup.episode_type), (wakeup.pool, "any")]
        heads = [(next(iter(self._queues[key])), key) for key in keys if key in self._queues]
        ticket, key = min(heads, default=(wakeup.before, keys[0]))
        if ticket >= wakeup.before:
            return False
        client = self._leave(key, ticket)
        if client is None or client.done():
            return self.pass_on(wakeup)
        client.set_result(wakeup)
        return True

    async def wait(
        self, pool: str, claim_type: ClaimType, timeout_s: float, request: RequestKey | None = None
    ) -> Wakeup | None:
        """Return when it is worth trying to claim again; None without a wake-up that could be passed on.

        `answered(request)` returns it too. Raises TimeoutError. A wake-up that arrives together with a
        timeout or a cancellation is passed on.
        """
        ticket = next(self._tickets)
        client: _Waiting = asyncio.get_running_loop().create_future()
        self._queues.setdefault((pool, claim_type), OrderedDict())[ticket] = client
        if request is not None:
            self._copies.setdefault(request, set()).add(client)
        try:
            async with asyncio.timeout(timeout_s):
                return await client
        except (TimeoutError, asyncio.CancelledError):
            wakeup = client.result() if client.done() and not client.cancelled() else None
            if wakeup is not None:
                self.pass_on(wakeup)
            raise
        finally:
            self._leave((pool, claim_type), ticket)
            if request is not None:
                self._forget_copy(request, client)

    def _leave(self, key: tuple[str, ClaimType], ticket: int) -> _Waiting | None:
        queue = self._queues.get(key)
        if queue is None:
            return None
        client = queue.pop(ticket, None)
        if not queue:
            del self._queues[key]
        return client

    def _forget_copy(self, request: RequestKey, client: _Waiting) -> None:
        copies = self._copies[request]
        copies.discard(client)
        if not copies:
            del self._copies[request]


def _wake(client: _Waiting) -> None:
    if not client.done():
        client.set_result(None)
