"""When claims lapse: a heap of deadlines, so that the next one is found without looking at every claim.

Invariant: each running claim has exactly one entry, never later than its deadline; deadlines only move back
while a claim runs, so entries are put right when they reach the top.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tinkerscript.server.episode import Episode


class Leases:
    """The running claims by deadline. Each operation costs O(log n), amortised."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, int, Episode]] = []

    def start(self, episode: Episode) -> None:
        """The episode's last claim begins its lease; `lease_s` and `ends_at` are set."""
        episode.calls_in_flight = 0
        episode.renewed_at = self._clock()
        heapq.heappush(self._heap, (episode.deadline, episode.sequence, episode.attempt, episode))

    def next_deadline(self) -> float | None:
        """When to look for lapsed claims, on the clock; None while nothing is claimed."""
        while self._heap:
            at, sequence, attempt, episode = self._heap[0]
            if episode.state != "claimed" or episode.attempt != attempt:
                heapq.heappop(self._heap)
            elif episode.deadline > at:
                heapq.heapreplace(self._heap, (episode.deadline, sequence, attempt, episode))
            else:
                return at
        return None

    def lapsed(self) -> Episode | None:
        """An episode whose claim has lapsed and must be closed before the next call; None if there is none.

        A claim with a model call in flight is active: only the end of its lifetime stops it.
        """
        now = self._clock()
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            episode = self._heap[0][3]
            if not episode.calls_in_flight or episode.ends_at <= now:
                return episode
            episode.renewed_at = now
        return None
