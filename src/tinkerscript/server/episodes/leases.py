"""When claims expire: the running claims by deadline, what renews them, and which one is due.

Invariant: each running claim has exactly one heap entry, never later than its deadline. A running claim's
deadline only ever moves later, so an entry is corrected when it reaches the top. Each operation costs
O(log n), amortized.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tinkerscript.server.episodes.record import EpisodeRecord


class Leases:
    """The running claims. A lease expires `lease_s` after the last activity, and no later than `ends_at`."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], *, max_claim_s: float) -> None:
        """`clock` measures leases; `wall` (Unix time) measures lifetimes, also across a restart."""
        self._clock = clock
        self._wall = wall
        self._max_claim_s = max_claim_s
        self._heap: list[tuple[float, int, int, EpisodeRecord]] = []

    def start(self, episode: EpisodeRecord) -> None:
        """Start the lease of the episode's last claim, whose `lease_s` and `claimed_at` are set."""
        episode.ends_at = self._clock() + self._max_claim_s - self.age_s(episode)
        episode.calls_in_flight = 0
        self.renew(episode)
        heapq.heappush(self._heap, (episode.deadline, episode.sequence, episode.attempt, episode))

    def renew(self, episode: EpisodeRecord) -> None:
        """Record activity of the claim that holds the lease."""
        episode.renewed_at = self._clock()

    def begin_call(self, episode: EpisodeRecord) -> None:
        """A model call of the claim that holds the lease begins: the lease does not expire before it ends."""
        episode.calls_in_flight += 1
        self.renew(episode)

    def end_call(self, episode: EpisodeRecord, attempt: int) -> None:
        """A model call is over: renews the lease, unless the claim was lost in the meantime."""
        if episode.state == "claimed" and episode.attempt == attempt:
            episode.calls_in_flight -= 1
            self.renew(episode)

    def next_deadline(self) -> float | None:
        """When to look for expired claims, on the clock; None while nothing is claimed."""
        while self._heap:
            at, sequence, attempt, episode = self._heap[0]
            if episode.state != "claimed" or episode.attempt != attempt:
                heapq.heappop(self._heap)
            elif episode.deadline > at:
                heapq.heapreplace(self._heap, (episode.deadline, sequence, attempt, episode))
            else:
                return at
        return None

    def find_expired(self) -> tuple[EpisodeRecord, str, str] | None:
        """An episode whose claim has expired, with the failure's kind and message; None if there is none.

        The claim must be closed before the next call. A model call in flight counts as activity: only the end
        of the claim's lifetime stops it.
        """
        now = self._clock()
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            episode = self._heap[0][3]
            if episode.ends_at <= now:
                return episode, "claim_expired", f"the claim exceeded its limit of {self._max_claim_s:g} s"
            if not episode.calls_in_flight:
                return episode, "lease_expired", f"no activity for {episode.lease_s:g} s"
            self.renew(episode)
        return None

    def left_s(self, episode: EpisodeRecord) -> float:
        """Seconds until the last claim ends, however active it is."""
        return max(0.0, episode.ends_at - self._clock())

    def lease_left_s(self, episode: EpisodeRecord) -> float:
        """Seconds until the last claim expires without further activity; a call in flight is activity."""
        now = self._clock()
        active_at = now if episode.calls_in_flight else episode.renewed_at
        return max(0.0, min(active_at + episode.lease_s, episode.ends_at) - now)

    def age_s(self, episode: EpisodeRecord) -> float:
        """Seconds since the last claim was made."""
        return max(0.0, self._wall() - episode.claimed_at)

    def last_activity(self, episode: EpisodeRecord) -> float:
        """Unix time of the last claim's last activity; 0 before the first claim."""
        if not episode.renewed_at:
            return episode.claimed_at
        idle_s = 0.0 if episode.calls_in_flight else self._clock() - episode.renewed_at
        return max(episode.claimed_at, self._wall() - idle_s)
