"""`ClientActivity`: what each client has done, for people: results, failures, its rate, its last visit.

Invariant: it remembers at most `MAX_CLIENTS` clients, those that came last, and a fixed amount of each.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

MAX_CLIENTS = 1000

RATE_S = 60.0
"""Time constant of the rate: an attempt counts by how long ago it ended, as exp(-age / RATE_S)."""

MIN_AGE_S = 5.0
"""A client that has just come is not as fast as its first result makes it look."""


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
    """Seconds since it asked for an episode or finished one."""


class ClientActivity:
    """The clients of one server, since it started."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()

    def seen(self, client_uuid: str) -> _Client:
        """The client has asked for an episode."""
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

    def of(self, client_uuid: str) -> Activity | None:
        """None for a client that is not remembered."""
        client, now = self._clients.get(client_uuid), self._clock()
        if client is None:
            return None
        recent = client.recent * _weight(now - client.recent_at)
        age = max(MIN_AGE_S, now - client.first_seen)
        per_minute = recent * 60 / (RATE_S * (1 - _weight(age)))
        return Activity(client.ended, client.failed, per_minute, now - client.last_seen)


def _weight(age_s: float) -> float:
    return math.exp(-age_s / RATE_S)
