"""Queues and indexes over a run's episodes. Each agrees with a scan over all episodes.

A claimable episode wakes the longest-waiting client that may claim it, and a client that cannot use the
wake-up passes it on, so no episode stays idle while a client waits.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tinkerscript.limits import EPISODE_BYTES
from tinkerscript.protocol import TRAINER_POOL, ClaimType, EpisodeCounts, EpisodeType
from tinkerscript.server.episodes.record import (
    CLAIM_EXPIRED,
    EPISODE_TYPES,
    LEASE_EXPIRED,
    STATUSES,
    EpisodeRecord,
    State,
    Status,
)

RequestKey = tuple[str, str]

# Consumed episodes that only the ledger has.
PastCounts = Mapping[tuple[str, EpisodeType, State], int]


class StoredEpisodes(NamedTuple):
    present: list[EpisodeRecord]
    """In order of registration."""

    past: PastCounts = MappingProxyType({})
    last_sequence: int = 0
    """Of all episodes, like `last_end`."""

    last_end: int = 0


REMEMBERED = 100_000  # Answered requests to remember after their claims.


class ClaimRequests:
    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._held: dict[RequestKey, dict[str, EpisodeRecord]] = {}
        self._over: OrderedDict[RequestKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held) + len(self._over)

    def restore(self, episodes: Iterable[EpisodeRecord]) -> None:
        over = list[RequestKey]()
        for episode in episodes:
            keys = zip(episode.claimants, episode.request_ids, strict=True)
            for attempt, key in enumerate(keys, 1):
                if not key[1]:
                    continue
                if attempt == episode.attempt and episode.state == "claimed":
                    self.claimed(episode)
                else:
                    over.append(key)
        for key in over:
            if key not in self._held:
                self._remember(key)

    def claimed(self, episode: EpisodeRecord) -> None:
        key = _key(episode)
        if key[1]:
            self._held.setdefault(key, {})[episode.uuid] = episode

    def closed(self, episode: EpisodeRecord) -> None:
        key = _key(episode)
        if not key[1]:
            return
        held = self._held[key]
        del held[episode.uuid]
        if not held:
            del self._held[key]
            self._remember(key)

    def answered(self, key: RequestKey) -> list[EpisodeRecord] | None:
        held = self._held.get(key)
        if held is not None:
            return list(held.values())
        return [] if key in self._over else None

    def _remember(self, key: RequestKey) -> None:
        self._over[key] = None
        self._over.move_to_end(key)
        while len(self._over) > self._remembered:
            self._over.popitem(last=False)


def _key(episode: EpisodeRecord) -> RequestKey:
    return episode.claimants[-1], episode.request_ids[-1]


class _Queue:
    __slots__ = ("heap", "registered")

    def __init__(self) -> None:
        self.heap: list[tuple[int, str]] = []
        """(sequence, uuid), also of episodes no longer registered."""
        self.registered = 0


class Queues:
    def __init__(self, find: Callable[[str], EpisodeRecord]) -> None:
        self._find = find
        self._queues: dict[tuple[str, EpisodeType], _Queue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def put(self, episode: EpisodeRecord) -> None:
        queue = self._queues.setdefault((episode.pool, episode.episode_type), _Queue())
        queue.registered += 1
        heapq.heappush(queue.heap, (episode.sequence, episode.uuid))

    def remove(self, episode: EpisodeRecord) -> None:
        key = (episode.pool, episode.episode_type)
        queue = self._queues[key]
        queue.registered -= 1
        if not queue.registered:
            del self._queues[key]

    def claimable(self, pool: str, claim_type: ClaimType) -> int:
        return sum(queue.registered for queue in self._of(pool, claim_type))

    def oldest(self, pool: str, claim_type: ClaimType) -> EpisodeRecord | None:
        queues = self._of(pool, claim_type)
        while waiting := [queue for queue in queues if queue.heap]:
            queue = min(waiting, key=lambda candidate: candidate.heap[0])
            # Evaluations first: the trainer starts as many as may run at once.
            if pool == TRAINER_POOL:
                queue = waiting[-1]
            episode = self._find(heapq.heappop(queue.heap)[1])
            if episode.state == "registered":
                return episode
        return None

    def _of(self, pool: str, claim_type: ClaimType) -> list[_Queue]:
        kinds = EPISODE_TYPES if claim_type == "any" else (claim_type,)
        return [queue for kind in kinds if (queue := self._queues.get((pool, kind))) is not None]


class Wakeup(NamedTuple):
    pool: str
    episode_type: EpisodeType
    before: int
    """Only clients with a smaller ticket get it next, so chains end."""


_Waiting = asyncio.Future[Wakeup | None]


class LongPollQueue:
    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._queues: dict[tuple[str, ClaimType], OrderedDict[int, _Waiting]] = {}
        """Ticket -> waiting client, without empty queues."""

        self._copies: dict[RequestKey, set[_Waiting]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def notify(self, pool: str, episode_type: EpisodeType) -> None:
        self.pass_on(Wakeup(pool, episode_type, next(self._tickets)))

    def notify_all(self) -> None:
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            for client in queue.values():
                _wake(client)

    def answered(self, request: RequestKey) -> None:
        for client in self._copies.get(request, ()):
            _wake(client)

    def pass_on(self, wakeup: Wakeup) -> bool:
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
        """Wait until a claim may succeed, or `answered(request)` is called.

        Returns a wake-up to pass on, or None. Raises TimeoutError.
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


CHECKED_S = 1.0


class Leases:
    """A lease expires `lease_s` after the last activity, at the latest at `ends_at`."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float], *, max_claim_s: float) -> None:
        self._clock = clock
        self._wall = wall
        self._max_claim_s = max_claim_s
        # One entry per running claim, never later than its deadline (after a call, at most by `CHECKED_S`).
        # Deadlines only move later, so entries are corrected at the top.
        self._heap: list[tuple[float, int, int, EpisodeRecord]] = []

    def start(self, episode: EpisodeRecord) -> None:
        episode.ends_at = self._clock() + self._max_claim_s - self.age_s(episode)
        episode.calls_in_flight = 0
        self.renew(episode)
        heapq.heappush(self._heap, (episode.deadline, episode.sequence, episode.attempt, episode))

    def renew(self, episode: EpisodeRecord) -> None:
        episode.renewed_at = self._clock()

    def begin_call(self, episode: EpisodeRecord) -> None:
        episode.calls_in_flight += 1
        self.renew(episode)

    def end_call(self, episode: EpisodeRecord, attempt: int) -> None:
        if episode.state == "claimed" and episode.attempt == attempt:
            episode.calls_in_flight -= 1
            self.renew(episode)

    def next_deadline(self) -> float | None:
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
        """Find an expired claim's episode, and the failure's kind and message.

        Close the claim before calling again. A running model call counts as activity.
        """
        now = self._clock()
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            episode = self._heap[0][3]
            if episode.ends_at <= now:
                return episode, CLAIM_EXPIRED, f"the claim exceeded its limit of {self._max_claim_s:g} s"
            if not episode.calls_in_flight:
                return episode, LEASE_EXPIRED, f"no activity for {episode.lease_s:g} s"
            episode.renewed_at = now + max(0.0, CHECKED_S - episode.lease_s)
        return None

    def left_s(self, episode: EpisodeRecord) -> float:
        return max(0.0, episode.ends_at - self._clock())

    def lease_left_s(self, episode: EpisodeRecord) -> float:
        now = self._clock()
        active_at = now if episode.calls_in_flight else episode.renewed_at
        return max(0.0, min(active_at + episode.lease_s, episode.ends_at) - now)

    def age_s(self, episode: EpisodeRecord) -> float:
        return max(0.0, self._wall() - episode.claimed_at)

    def last_activity(self, episode: EpisodeRecord) -> float:
        """Unix time; 0 before the first claim."""
        if not episode.renewed_at:
            return episode.claimed_at
        idle_s = 0.0 if episode.calls_in_flight else self._clock() - episode.renewed_at
        return max(episode.claimed_at, self._wall() - idle_s)


class StateCounts:
    def __init__(self) -> None:
        self._types: dict[EpisodeType, dict[Status, int]] = {kind: _zeros() for kind in EPISODE_TYPES}
        self._pools: dict[str, dict[Status, int]] = {TRAINER_POOL: _zeros()}
        self._unfinished: dict[str, int] = {}
        self._payloads: dict[str, int] = {}
        """Payload bytes of unfinished episodes, by pool."""

        self.clients_bytes = 0
        """Share of `limits.ALL_POOLS_BYTES`."""

        self._failures: dict[EpisodeType, int] = dict.fromkeys(EPISODE_TYPES, 0)

    def count(self, episode: EpisodeRecord, step: int) -> None:
        """`step`: +1 on entering a state, -1 on leaving."""
        self._types[episode.episode_type][episode.status] += step
        pool = self._pools.get(episode.pool)
        if pool is None:
            pool = self._pools[episode.pool] = _zeros()
        pool[episode.status] += step
        if step > 0 and episode.state == "failed":
            self._failures[episode.episode_type] += 1

    def past(self, pool: str, kind: EpisodeType, state: State, number: int) -> None:
        status = "accepted" if state == "ended" else state
        self._types[kind][status] += number
        self._pools.setdefault(pool, _zeros())[status] += number
        if state == "failed":
            self._failures[kind] += number

    def begun(self, episode: EpisodeRecord) -> None:
        self._unfinished[episode.pool] = self._unfinished.get(episode.pool, 0) + 1
        self._payloads[episode.pool] = self._payloads.get(episode.pool, 0) + len(episode.payload)
        if episode.pool != TRAINER_POOL:
            self.clients_bytes += len(episode.payload) + EPISODE_BYTES

    def finished(self, episode: EpisodeRecord) -> None:
        """The episode must still have its payload."""
        left = self._unfinished[episode.pool] - 1
        self._payloads[episode.pool] -= len(episode.payload)
        if episode.pool != TRAINER_POOL:
            self.clients_bytes -= len(episode.payload) + EPISODE_BYTES
        if left:
            self._unfinished[episode.pool] = left
        else:
            del self._unfinished[episode.pool], self._payloads[episode.pool]

    def unfinished(self, pool: str) -> int:
        return self._unfinished.get(pool, 0)

    def payload_bytes(self, pool: str) -> int:
        return self._payloads.get(pool, 0)

    def by_type(self) -> dict[EpisodeType, EpisodeCounts]:
        return {kind: EpisodeCounts(**counts) for kind, counts in self._types.items()}

    def by_pool(self, *, unfinished_only: bool = False) -> dict[str, EpisodeCounts]:
        return {
            pool: EpisodeCounts(**counts)
            for pool, counts in self._pools.items()
            if not unfinished_only or pool in self._unfinished or pool == TRAINER_POOL
        }

    def failures(self) -> dict[EpisodeType, int]:
        """Never decreases."""
        return dict(self._failures)


def _zeros() -> dict[Status, int]:
    return dict.fromkeys(STATUSES, 0)
