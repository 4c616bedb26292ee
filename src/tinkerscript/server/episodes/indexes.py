"""When claims lapse: a heap of deadlines, so that the next one is found without looking at every claim.

Invariant: each running claim has exactly one entry, never later than its deadline; deadlines only move back
while a claim runs, so entries are put right when they reach the top.

What each claim request was answered with, by (`client_uuid`, `claim_request_id`).

Invariant: a request is answered with new claims once; as long as one of them holds, a repetition finds it.
Of requests whose claims are all over only the ids are kept, the latest `remembered`.

The pools: whose episodes they are, which of them are registered, and how many are in each state.

Invariant: `Queues` holds a queue only while it has a registered episode; `StateCounts` equals a count over
all episodes. Each operation costs O(log n) or less, whatever other pools hold.

`Ledger`: every episode of a run with the indexes over them, and the one place where a state changes.

Invariant: each move is in `TRANSITIONS`, and the indexes (queues, leases, answered requests, counts, what is
unfinished, dead letters) say what a scan over all episodes would say. What changed is collected until
`take_changes`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from tinkerscript.errors import ConflictError, UnknownEpisodeError
from tinkerscript.protocol import TRAINER_POOL, ClaimType, EpisodeCounts, EpisodeType
from tinkerscript.server.episodes.record import (
    EPISODE_TYPES,
    STATES,
    TRANSITIONS,
    Changes,
    ClosedClaim,
    EpisodeRecord,
    State,
)

RequestKey = tuple[str, str]
"""`client_uuid` and `claim_request_id`."""


class Leases:
    """The running claims by deadline. Each operation costs O(log n), amortised."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, int, EpisodeRecord]] = []

    def start(self, episode: EpisodeRecord) -> None:
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

    def lapsed(self) -> EpisodeRecord | None:
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


REMEMBERED = 100_000
"""Answered requests whose claims are over that are told from new ones."""


class ClaimRequests:
    """The index of answered requests. Claims without a request id are not in it."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._held: dict[RequestKey, dict[str, EpisodeRecord]] = {}
        self._over: OrderedDict[RequestKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held) + len(self._over)

    def restore(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Fill an empty index from the request ids that are stored with the episodes."""
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
        """The episode's last claim answers its request."""
        key = _key(episode)
        if key[1]:
            self._held.setdefault(key, {})[episode.uuid] = episode

    def closed(self, episode: EpisodeRecord) -> None:
        """The episode's last claim is over."""
        key = _key(episode)
        if not key[1]:
            return
        held = self._held[key]
        del held[episode.uuid]
        if not held:
            del self._held[key]
            self._remember(key)

    def answered(self, key: RequestKey) -> list[EpisodeRecord] | None:
        """The episodes whose claims still hold, in the order of the answer; None for a new request."""
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
        """(sequence, uuid); also of episodes that are not registered any more."""
        self.registered = 0


class Queues:
    """The registered episodes of each pool and type, oldest first."""

    def __init__(self, find: Callable[[str], EpisodeRecord]) -> None:
        self._find = find
        self._queues: dict[tuple[str, EpisodeType], _Queue] = {}

    def __len__(self) -> int:
        """Pools and types that have a registered episode."""
        return len(self._queues)

    def put(self, episode: EpisodeRecord) -> None:
        """The episode is registered (again)."""
        queue = self._queues.setdefault((episode.pool, episode.episode_type), _Queue())
        queue.registered += 1
        heapq.heappush(queue.heap, (episode.sequence, episode.uuid))

    def left(self, episode: EpisodeRecord) -> None:
        """The episode is not registered any more."""
        key = (episode.pool, episode.episode_type)
        queue = self._queues[key]
        queue.registered -= 1
        if not queue.registered:
            del self._queues[key]

    def claimable(self, pool: str, claim_type: ClaimType) -> int:
        """How many episodes are registered for a claim of this pool and type."""
        return sum(queue.registered for queue in self._of(pool, claim_type))

    def oldest(self, pool: str, claim_type: ClaimType, not_before_by: str = "") -> EpisodeRecord | None:
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


class StateCounts:
    """How many episodes of each type and of each pool are in each state."""

    def __init__(self) -> None:
        self._types: dict[EpisodeType, dict[State, int]] = {kind: _zeros() for kind in EPISODE_TYPES}
        self._pools: dict[str, dict[State, int]] = {TRAINER_POOL: _zeros()}
        self._unfinished: dict[str, int] = {}
        self._failures: dict[EpisodeType, int] = dict.fromkeys(EPISODE_TYPES, 0)

    def count(self, episode: EpisodeRecord, step: int) -> None:
        """The episode enters (+1) or leaves (-1) the state that it has."""
        self._types[episode.episode_type][episode.state] += step
        pool = self._pools.get(episode.pool)
        if pool is None:
            pool = self._pools[episode.pool] = _zeros()
        pool[episode.state] += step
        if step > 0 and episode.state == "failed":
            self._failures[episode.episode_type] += 1

    def begun(self, episode: EpisodeRecord) -> None:
        """The episode is neither over nor acknowledged."""
        self._unfinished[episode.pool] = self._unfinished.get(episode.pool, 0) + 1

    def finished(self, episode: EpisodeRecord) -> None:
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


class Ledger:
    """What `EpisodeBook` and `DeadLetters` work on."""

    def __init__(self, *, clock: Callable[[], float], wall: Callable[[], float], max_claim_s: float) -> None:
        self.clock = clock
        self.wall = wall
        self.max_claim_s = max_claim_s
        self.episodes: dict[str, EpisodeRecord] = {}
        self.unfinished: dict[int, EpisodeRecord] = {}
        """Not over and acknowledged, by sequence, in its order."""

        self.dead_letters: dict[int, EpisodeRecord] = {}
        """Failed and not dropped, by sequence, in the order of failing."""

        self.queues = Queues(self.get)
        self.leases = Leases(clock)
        self.requests = ClaimRequests()
        self.claims_of: dict[str, dict[str, EpisodeRecord]] = {}
        """Claims that hold their lease: `client_uuid` -> episode uuid -> episode."""

        self.census = StateCounts()
        self._changes = Changes()
        self._next_sequence = 1

    def get(self, uuid: str) -> EpisodeRecord:
        """Raises UnknownEpisodeError."""
        try:
            return self.episodes[uuid]
        except KeyError:
            raise UnknownEpisodeError(f"this server holds no episode {uuid!r}") from None

    def restore(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Fill an empty ledger with stored episodes, in the order of their sequence."""
        for episode in episodes:
            self._next_sequence = max(self._next_sequence, episode.sequence + 1)
            self._enter(episode)
            if episode.state == "claimed":
                self._start_claim(episode)
        self.requests.restore(self.episodes.values())

    def next_sequence(self) -> int:
        """A number that no episode has."""
        self._next_sequence += 1
        return self._next_sequence - 1

    def add(self, episode: EpisodeRecord) -> None:
        """Take in a new episode."""
        self._enter(episode)
        self._changes.added[episode.uuid] = episode

    def move(self, episode: EpisodeRecord, state: State) -> None:
        """Raises ConflictError for a move that is not in the table."""
        if state not in TRANSITIONS[episode.state]:
            raise ConflictError(f"episode {episode.uuid!r} cannot go from {episode.state} to {state}")
        if episode.state == "registered":
            self.queues.left(episode)
        elif episode.state == "failed":
            del self.dead_letters[episode.sequence]
        self.census.count(episode, -1)
        episode.state = state
        self.census.count(episode, +1)
        self.touch(episode)
        if state == "registered":
            self.queues.put(episode)
        elif state == "failed":
            self.dead_letters[episode.sequence] = episode

    def open_claim(
        self, episode: EpisodeRecord, client_uuid: str, claim_request_id: str, lease_s: float
    ) -> None:
        """Hand the registered episode, which is off its queue, to a client."""
        self.move(episode, "claimed")
        episode.claimants.append(client_uuid)
        episode.request_ids.append(claim_request_id)
        episode.lease_s = lease_s
        episode.claimed_at = self.wall()
        self._start_claim(episode)
        self.requests.claimed(episode)

    def close_claim(self, episode: EpisodeRecord, state: State) -> None:
        """The claim that holds the lease is over."""
        owned = self.claims_of[episode.client_uuid]
        del owned[episode.uuid]
        if not owned:
            del self.claims_of[episode.client_uuid]
        self.requests.closed(episode)
        self._changes.closed.append(ClosedClaim(episode, episode.attempt, counts=state == "ended"))
        self.move(episode, state)

    def acknowledge(self, episode: EpisodeRecord) -> None:
        """The outcome of an episode that is over is in the trainer's journal."""
        if episode.state == "ended":
            self.move(episode, "accepted")
        self.touch(episode)
        episode.acknowledged = True
        episode.payload = episode.result = b""
        self.census.finished(episode)
        del self.unfinished[episode.sequence]

    def touch(self, episode: EpisodeRecord) -> None:
        """Something that is stored has changed."""
        if episode.uuid not in self._changes.added:
            self._changes.saved[episode.uuid] = episode

    def take_changes(self) -> Changes:
        """The changes since the last call, each episode once."""
        changes, self._changes = self._changes, Changes()
        return changes

    def _enter(self, episode: EpisodeRecord) -> None:
        self.episodes[episode.uuid] = episode
        self.census.count(episode, +1)
        if not episode.acknowledged:
            self.census.begun(episode)
            self.unfinished[episode.sequence] = episode
        if episode.state == "registered":
            self.queues.put(episode)
        elif episode.state == "failed" and not episode.dropped:
            self.dead_letters[episode.sequence] = episode

    def _start_claim(self, episode: EpisodeRecord) -> None:
        age_s = max(0.0, self.wall() - episode.claimed_at)
        episode.ends_at = self.clock() + self.max_claim_s - age_s
        self.leases.start(episode)
        self.claims_of.setdefault(episode.client_uuid, {})[episode.uuid] = episode


def page(episodes: Iterable[EpisodeRecord], *, after: int, limit: int) -> list[EpisodeRecord]:
    """The first `limit` of `episodes`, which are in the order of their sequence, past the number `after`."""
    return list(islice((episode for episode in episodes if episode.sequence > after), limit))
