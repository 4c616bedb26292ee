"""`Ledger`: every episode of a run with the indexes over them, and the one place where a state changes.

Invariant: each move is in `TRANSITIONS`, and the indexes (queues, leases, answered requests, counts, what is
unfinished, dead letters) say what a scan over all episodes would say. What changed is collected until
`take_changes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from tinkerscript.errors import ConflictError, UnknownEpisodeError
from tinkerscript.server.claim_requests import ClaimRequests
from tinkerscript.server.episode import TRANSITIONS, Changes, ClosedClaim, Episode, State
from tinkerscript.server.leases import Leases
from tinkerscript.server.pools import Census, Queues


class Ledger:
    """What `EpisodeBook` and `DeadLetters` work on."""

    def __init__(self, *, clock: Callable[[], float], wall: Callable[[], float], max_claim_s: float) -> None:
        self.clock = clock
        self.wall = wall
        self.max_claim_s = max_claim_s
        self.episodes: dict[str, Episode] = {}
        self.unfinished: dict[int, Episode] = {}
        """Not over and acknowledged, by sequence, in its order."""

        self.dead_letters: dict[int, Episode] = {}
        """Failed and not dropped, by sequence, in the order of failing."""

        self.queues = Queues(self.get)
        self.leases = Leases(clock)
        self.requests = ClaimRequests()
        self.claims_of: dict[str, dict[str, Episode]] = {}
        """Claims that hold their lease: `client_uuid` -> episode uuid -> episode."""

        self.census = Census()
        self._changes = Changes()
        self._next_sequence = 1

    def get(self, uuid: str) -> Episode:
        """Raises UnknownEpisodeError."""
        try:
            return self.episodes[uuid]
        except KeyError:
            raise UnknownEpisodeError(f"this server holds no episode {uuid!r}") from None

    def restore(self, episodes: Iterable[Episode]) -> None:
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

    def add(self, episode: Episode) -> None:
        """Take in a new episode."""
        self._enter(episode)
        self._changes.added[episode.uuid] = episode

    def move(self, episode: Episode, state: State) -> None:
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

    def open_claim(self, episode: Episode, client_uuid: str, claim_request_id: str, lease_s: float) -> None:
        """Hand the registered episode, which is off its queue, to a client."""
        self.move(episode, "claimed")
        episode.claimants.append(client_uuid)
        episode.request_ids.append(claim_request_id)
        episode.lease_s = lease_s
        episode.claimed_at = self.wall()
        self._start_claim(episode)
        self.requests.claimed(episode)

    def close_claim(self, episode: Episode, state: State) -> None:
        """The claim that holds the lease is over."""
        owned = self.claims_of[episode.client_uuid]
        del owned[episode.uuid]
        if not owned:
            del self.claims_of[episode.client_uuid]
        self.requests.closed(episode)
        self._changes.closed.append(ClosedClaim(episode, episode.attempt, counts=state == "ended"))
        self.move(episode, state)

    def acknowledge(self, episode: Episode) -> None:
        """The outcome of an episode that is over is in the trainer's journal."""
        if episode.state == "ended":
            self.move(episode, "accepted")
        self.touch(episode)
        episode.acknowledged = True
        episode.payload = episode.result = b""
        self.census.finished(episode)
        del self.unfinished[episode.sequence]

    def touch(self, episode: Episode) -> None:
        """Something that is stored has changed."""
        if episode.uuid not in self._changes.added:
            self._changes.saved[episode.uuid] = episode

    def take_changes(self) -> Changes:
        """The changes since the last call, each episode once."""
        changes, self._changes = self._changes, Changes()
        return changes

    def _enter(self, episode: Episode) -> None:
        self.episodes[episode.uuid] = episode
        self.census.count(episode, +1)
        if not episode.acknowledged:
            self.census.begun(episode)
            self.unfinished[episode.sequence] = episode
        if episode.state == "registered":
            self.queues.put(episode)
        elif episode.state == "failed" and not episode.dropped:
            self.dead_letters[episode.sequence] = episode

    def _start_claim(self, episode: Episode) -> None:
        age_s = max(0.0, self.wall() - episode.claimed_at)
        episode.ends_at = self.clock() + self.max_claim_s - age_s
        self.leases.start(episode)
        self.claims_of.setdefault(episode.client_uuid, {})[episode.uuid] = episode


def page(episodes: Iterable[Episode], *, after: int, limit: int) -> list[Episode]:
    """The first `limit` of `episodes`, which are in the order of their sequence, past the number `after`."""
    return list(islice((episode for episode in episodes if episode.sequence > after), limit))
