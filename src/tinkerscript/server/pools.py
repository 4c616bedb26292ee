"""The pools: whose episodes they are, which of them are registered, and how many are in each state.

Invariant: `Queues` holds a queue only while it has a registered episode; `Census` equals a count over all
episodes. Each operation costs O(log n) or less, whatever other pools hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tinkerscript.protocol import TRAINER_POOL, ClaimType, EpisodeCounts, EpisodeType
from tinkerscript.server.episode import EPISODE_TYPES, STATES, Episode, State


class _Queue:
    __slots__ = ("heap", "registered")

    def __init__(self) -> None:
        self.heap: list[tuple[int, str]] = []
        """(sequence, uuid); also of episodes that are not registered any more."""
        self.registered = 0


class Queues:
    """The registered episodes of each pool and type, oldest first."""

    def __init__(self, find: Callable[[str], Episode]) -> None:
        self._find = find
        self._queues: dict[tuple[str, EpisodeType], _Queue] = {}

    def __len__(self) -> int:
        """Pools and types that have a registered episode."""
        return len(self._queues)

    def put(self, episode: Episode) -> None:
        """The episode is registered (again)."""
        queue = self._queues.setdefault((episode.pool, episode.episode_type), _Queue())
        queue.registered += 1
        heapq.heappush(queue.heap, (episode.sequence, episode.uuid))

    def left(self, episode: Episode) -> None:
        """The episode is not registered any more."""
        key = (episode.pool, episode.episode_type)
        queue = self._queues[key]
        queue.registered -= 1
        if not queue.registered:
            del self._queues[key]

    def claimable(self, pool: str, claim_type: ClaimType) -> int:
        """How many episodes are registered for a claim of this pool and type."""
        return sum(queue.registered for queue in self._of(pool, claim_type))

    def oldest(self, pool: str, claim_type: ClaimType, not_before_by: str = "") -> Episode | None:
        """Take out the oldest registered episode, or the oldest that `not_before_by` has never claimed."""
        queues = self._of(pool, claim_type)
        passed_over = list[tuple[_Queue, tuple[int, str]]]()
        found = None
        while found is None and (left := [queue for queue in queues if queue.heap]):
            queue = min(left, key=lambda candidate: candidate.heap[0])
            entry = heapq.heappop(queue.heap)
            episode = self._find(entry[1])
            if episode.state != "registered":
                continue
            if not_before_by and not_before_by in episode.claimants:
                passed_over.append((queue, entry))
            else:
                found = episode
        for queue, entry in passed_over:
            heapq.heappush(queue.heap, entry)
        return found

    def _of(self, pool: str, claim_type: ClaimType) -> list[_Queue]:
        kinds = EPISODE_TYPES if claim_type == "any" else (claim_type,)
        return [queue for kind in kinds if (queue := self._queues.get((pool, kind))) is not None]


class Census:
    """How many episodes of each type and of each pool are in each state."""

    def __init__(self) -> None:
        self._types: dict[EpisodeType, dict[State, int]] = {kind: _zeros() for kind in EPISODE_TYPES}
        self._pools: dict[str, dict[State, int]] = {TRAINER_POOL: _zeros()}
        self._unfinished: dict[str, int] = {}
        self._failures: dict[EpisodeType, int] = dict.fromkeys(EPISODE_TYPES, 0)

    def count(self, episode: Episode, step: int) -> None:
        """The episode enters (+1) or leaves (-1) the state that it has."""
        self._types[episode.episode_type][episode.state] += step
        pool = self._pools.get(episode.pool)
        if pool is None:
            pool = self._pools[episode.pool] = _zeros()
        pool[episode.state] += step
        if step > 0 and episode.state == "failed":
            self._failures[episode.episode_type] += 1

    def begun(self, episode: Episode) -> None:
        """The episode is neither over nor acknowledged."""
        self._unfinished[episode.pool] = self._unfinished.get(episode.pool, 0) + 1

    def finished(self, episode: Episode) -> None:
        """The episode is over and acknowledged."""
        left = self._unfinished[episode.pool] - 1
        if left:
            self._unfinished[episode.pool] = left
        else:
            del self._unfinished[episode.pool]

    def unfinished(self, pool: str) -> int:
        """Episodes of the pool that are not over and acknowledged."""
        return self._unfinished.get(pool, 0)

    def counts(self) -> dict[EpisodeType, EpisodeCounts]:
        """By type, over all pools."""
        return {kind: EpisodeCounts(**counts) for kind, counts in self._types.items()}

    def pools(self, *, unfinished_only: bool = False) -> dict[str, EpisodeCounts]:
        """By pool, over both types; the trainer's is always there."""
        return {
            pool: EpisodeCounts(**counts)
            for pool, counts in self._pools.items()
            if not unfinished_only or pool in self._unfinished or pool == TRAINER_POOL
        }

    def failures(self) -> dict[EpisodeType, int]:
        """Times that an episode of each type failed; unlike the state's count it never shrinks."""
        return dict(self._failures)


def _zeros() -> dict[State, int]:
    return dict.fromkeys(STATES, 0)
