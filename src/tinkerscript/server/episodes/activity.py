"""`ClientActivity`: what each client has done, for people: results, failures, its rate, its last visit.
`RunEnd`: that they hear of the run's end.

Invariant: it remembers at most `MAX_CLIENTS` clients, those that came last, and a fixed amount of each.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

MAX_CLIENTS = 1000

RATE_S = 60.0
"""Time constant of the rate: an attempt counts by how long ago it ended, as exp(-age / RATE_S)."""

MIN_AGE_S = 5.0
"""A client that has just come is not as fast as its first result makes it look."""

LATELY_S = 35.0
"""A worker that is alive asks again within this time: it waits for the end with requests of 30 s."""

FAREWELL_S = 2.5
"""Seconds that a server of a finished run stays for those that have not heard of it."""


@dataclass(slots=True)
class _Client:
    first_seen: float
    last_seen: float
    ended: int = 0
    failed: int = 0
    recent: float = 0.0
    """Its attempts, each by its age at `recent_at`."""

    recent_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Activity:
    """One client's."""

    ended: int
    """Attempts that ended with a result."""

    failed: int
    """Attempts that failed, among them leases that expired."""

    per_minute: float
    """Attempts a minute of late, with a result or failed."""

    idle_s: float
    """Seconds since it asked for an episode or finished one, or, every 30 s, whether the run is finished."""


class ClientActivity:
    """The clients of one server, since it started."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def seen(self, client_uuid: str) -> _Client:
        """The client has asked for an episode, or whether the run is finished."""
        now = self._clock()
        client = self._clients.get(client_uuid)
        if client is None:
            if len(self._clients) >= MAX_CLIENTS:
                self._clients.popitem(last=False)
            client = self._clients[client_uuid] = _Client(first_seen=now, last_seen=now)
        client.last_seen = now
        self._clients.move_to_end(client_uuid)
        return client

    def finished(self, client_uuid: str, *, failed: bool) -> None:
        """An attempt of the client has ended: with a result, or without."""
        client = self.seen(client_uuid)
        client.failed += failed
        client.ended += not failed
        client.recent = client.recent * _weight(client.last_seen - client.recent_at) + 1
        client.recent_at = client.last_seen

    def latest(self, limit: int) -> list[str]:
        """The clients that came last, the latest first."""
        return list(islice(reversed(self._clients), limit))

    def since(self, seconds: float) -> Iterator[str]:
        """The clients that came within the last `seconds`."""
        oldest = self._clock() - seconds
        latest = reversed(self._clients.items())
        return (client_uuid for client_uuid, client in latest if client.last_seen >= oldest)

    def of(self, client_uuid: str) -> Activity | None:
        """None for a client that is not remembered."""
        client, now = self._clients.get(client_uuid), self._clock()
        if client is None:
            return None
        recent = client.recent * _weight(now - client.recent_at)
        age = max(MIN_AGE_S, now - client.first_seen)
        per_minute = recent * 60 / (RATE_S * (1 - _weight(age)))
        return Activity(client.ended, client.failed, per_minute, now - client.last_seen)


class RunEnd:
    """Whether the run is finished, and who does not know it yet.

    Invariant: a client that waits for it, or asks for an episode, hears of it at once. A server that is
    stopped afterwards goes when all have heard of it that came lately, or after a limit.
    """

    def __init__(self, activity: ClientActivity, *, farewell_s: float = FAREWELL_S) -> None:
        self._activity = activity
        self._farewell_s = farewell_s
        self._untold = set[str]()
        self._changed = asyncio.Event()
        self._closing = False
        self.is_here = False
        """Whether the run is finished."""

    def set(self, finished: bool) -> None:
        """The trainer says whether it has finished the run."""
        if finished and not self.is_here:
            self._untold = set(self._activity.since(LATELY_S))
        if finished != self.is_here:
            self.is_here = finished
            self._wake()

    def close(self) -> None:
        """Let nobody wait any longer: the server is shutting down."""
        self._closing = True
        self._wake()

    def told(self, client_uuid: str) -> None:
        """A reply to the client says that the run is finished."""
        self._untold.discard(client_uuid)
        if not self._untold:
            self._wake()

    async def wait(self, client_uuid: str, wait_s: float) -> bool:
        """Wait until the run is finished, at most `wait_s` seconds; whether it is."""
        self._activity.seen(client_uuid)
        try:
            async with asyncio.timeout(wait_s):
                while not self.is_here and not self._closing:
                    await self._changed.wait()
        except TimeoutError:
            pass
        if self.is_here:
            self.told(client_uuid)
        return self.is_here

    async def all_told(self) -> None:
        """If the run is finished, wait until every client knows it, for `farewell_s` seconds at most."""
        try:
            async with asyncio.timeout(self._farewell_s):
                while self.is_here and self._untold:
                    await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        """Wake whoever waits for a change; who waits next waits for the next one."""
        self._changed.set()
        self._changed = asyncio.Event()


def _weight(age_s: float) -> float:
    return math.exp(-age_s / RATE_S)
