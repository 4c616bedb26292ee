"""All episodes of a run: who may claim, renew, end and abort which, and in what order they are handed out.

Invariants: an episode ends exactly once (`accepted`, or `failed` with a reason for every attempt), and a
result counts only from the claim that holds the lease. Pure: no I/O, no asyncio, the clock is injected.
Each operation costs O(log n); what it changed is collected until `take_changes`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from tinkerscript.errors import ConflictError, NotTheOwnerError, UnknownEpisodeError
from tinkerscript.protocol import ClaimType, EpisodeCounts, EpisodeType, Failure
from tinkerscript.server.episode import (
    EPISODE_TYPES,
    TRANSITIONS,
    Changes,
    ClosedClaim,
    Episode,
    State,
    content_digest,
)


class EpisodeBook:
    """All episodes of one run."""

    def __init__(self, *, clock: Callable[[], float], max_attempts: int) -> None:
        self._clock = clock
        self._max_attempts = max_attempts
        self._episodes: dict[str, Episode] = {}
        self._queues: dict[EpisodeType, list[tuple[int, str]]] = {kind: [] for kind in EPISODE_TYPES}
        self._leases: list[tuple[float, str, int]] = []
        self._claims_of: dict[str, dict[str, Episode]] = {}
        self._counts: dict[EpisodeType, EpisodeCounts] = {kind: EpisodeCounts() for kind in EPISODE_TYPES}
        self._changes = Changes()
        self._next_sequence = 1

    # Reading

    def get(self, uuid: str) -> Episode:
        """Raises UnknownEpisodeError."""
        try:
            return self._episodes[uuid]
        except KeyError:
            raise UnknownEpisodeError(f"this server holds no episode {uuid!r}") from None

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes.values())

    def __len__(self) -> int:
        return len(self._episodes)

    def counts(self) -> dict[EpisodeType, EpisodeCounts]:
        """How many episodes of each type are in each state (a copy)."""
        return {kind: counts.model_copy() for kind, counts in self._counts.items()}

    def claimable(self, claim_type: ClaimType) -> int:
        """How many episodes are registered for a claim of this type."""
        return sum(self._counts[kind].registered for kind in _kinds(claim_type))

    def next_deadline(self) -> float | None:
        """When the next claim lapses, on the book's clock; None while nothing is claimed."""
        while self._leases:
            at, uuid, attempt = self._leases[0]
            episode = self._episodes[uuid]
            if episode.state != "claimed" or episode.attempt != attempt:
                heapq.heappop(self._leases)
            elif episode.deadline > at:
                heapq.heapreplace(self._leases, (episode.deadline, uuid, attempt))
            else:
                return at
        return None

    def why_lost(self, episode: Episode, attempt: int) -> str:
        """Why this claim does not hold the lease; empty if it does."""
        name = f"claim {attempt} of episode {episode.uuid}"
        if attempt == episode.attempt and episode.state == "claimed":
            return ""
        if attempt == episode.attempt and episode.state in ("ended", "accepted"):
            return f"{name} is over: the episode has ended with its result"
        for failure in episode.failures:
            if failure.attempt == attempt:
                return f"{name} lost its lease: {failure.kind}: {failure.message}"
        return f"{name} was never made; the last one is {episode.attempt}"

    def take_changes(self) -> Changes:
        """The changes since the last call, each episode once."""
        changes, self._changes = self._changes, Changes()
        return changes

    # Mutations

    def restore(self, episodes: Iterable[Episode]) -> None:
        """Fill an empty book with stored episodes; leases begin anew, since nobody could renew them."""
        for episode in episodes:
            self._episodes[episode.uuid] = episode
            self._next_sequence = max(self._next_sequence, episode.sequence + 1)
            self._count(episode, +1)
            if episode.state == "registered":
                self._enqueue(episode)
            elif episode.state == "claimed":
                self._start_lease(episode)

    def register(self, uuid: str, episode_type: EpisodeType, group_id: str, payload: bytes) -> Episode:
        """Add an episode. Repeated with the same content it changes nothing.

        Raises ConflictError if the uuid is known with other content.
        """
        digest = content_digest(episode_type.encode(), group_id.encode(), payload)
        known = self._episodes.get(uuid)
        if known is not None:
            if known.digest != digest:
                raise ConflictError(f"episode {uuid!r} is already registered with other content")
            return known
        episode = Episode(
            uuid=uuid,
            sequence=self._next_sequence,
            episode_type=episode_type,
            group_id=group_id,
            digest=digest,
            payload=payload,
        )
        self._next_sequence += 1
        self._episodes[uuid] = episode
        self._count(episode, +1)
        self._enqueue(episode)
        self._changes.added[uuid] = episode
        return episode

    def claim(
        self,
        client_uuid: str,
        claim_type: ClaimType,
        lease_s: float,
        *,
        policy_version: int = 0,
        may_repeat: bool = True,
    ) -> Episode | None:
        """Hand out the oldest registered episode, or None. Episodes that lost a claim are the oldest.

        With `may_repeat=False` the client is never given an episode that it claimed before.
        """
        episode = self._oldest(claim_type, "" if may_repeat else client_uuid)
        if episode is None:
            return None
        self._move(episode, "claimed")
        episode.claimants.append(client_uuid)
        episode.lease_s = lease_s
        episode.policy_version = policy_version
        self._start_lease(episode)
        return episode

    def renew(self, episode: Episode) -> None:
        """The claim that holds the lease showed activity."""
        episode.deadline = self._clock() + episode.lease_s

    def held(self, uuid: str, client_uuid: str, attempt: int | None) -> Episode:
        """The episode, if this claim holds its lease; renews it.

        Raises UnknownEpisodeError, or NotTheOwnerError with the reason.
        """
        episode = self.get(uuid)
        lost = self.why_lost(episode, _attempt_of(episode, client_uuid, attempt))
        if lost:
            raise NotTheOwnerError(lost)
        self.renew(episode)
        return episode

    def end(
        self, uuid: str, client_uuid: str, attempt: int | None, *, reward: float, result: bytes
    ) -> Episode:
        """Take the result of the claim that holds the lease. Repeated with the same content: no change.

        Raises UnknownEpisodeError, NotTheOwnerError, or ConflictError for another result after the first.
        """
        episode = self.get(uuid)
        number = _attempt_of(episode, client_uuid, attempt)
        digest = content_digest(result)
        if number == episode.attempt and episode.state in ("ended", "accepted"):
            if episode.result_digest != digest:
                raise ConflictError(f"episode {uuid!r} has already ended with another result")
            return episode
        lost = self.why_lost(episode, number)
        if lost:
            raise NotTheOwnerError(lost)
        episode.reward, episode.result, episode.result_digest = reward, result, digest
        self._close_claim(episode, "ended")
        return episode

    def abort(self, uuid: str, client_uuid: str, attempt: int | None, failure: Failure) -> Episode:
        """The owner's attempt failed: registered again, or failed if it was the last. Repeatable.

        Raises UnknownEpisodeError or NotTheOwnerError.
        """
        episode = self.get(uuid)
        number = _attempt_of(episode, client_uuid, attempt)
        failure = failure.model_copy(update={"attempt": number, "client_uuid": client_uuid})
        if failure in episode.failures:
            return episode
        lost = self.why_lost(episode, number)
        if lost:
            raise NotTheOwnerError(lost)
        self._lose(episode, failure)
        return episode

    def release_client(self, client_uuid: str, reason: str) -> list[Episode]:
        """The client is dead: all its claims are lost at once."""
        held = list(self._claims_of.get(client_uuid, {}).values())
        for episode in held:
            self._lose(episode, self._failure_of(episode, "worker_died", reason))
        return held

    def expire(self) -> list[Episode]:
        """Take the claims whose lease has run out; returns their episodes."""
        now, expired = self._clock(), list[Episode]()
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            episode = self._episodes[self._leases[0][1]]
            message = f"no activity for {episode.lease_s:g} s"
            self._lose(episode, self._failure_of(episode, "lease_expired", message))
            expired.append(episode)
        return expired

    def cancel(self, uuid: str, reason: str) -> bool:
        """The episode is not needed any more. False if it is over already: its outcome stands.

        Raises UnknownEpisodeError.
        """
        episode = self.get(uuid)
        if episode.state == "registered":
            episode.failures.append(Failure(kind="cancelled", message=reason))
            self._move(episode, "failed")
        elif episode.state == "claimed":
            episode.failures.append(self._failure_of(episode, "cancelled", reason))
            self._close_claim(episode, "failed")
        else:
            return False
        return True

    def acknowledge(self, uuid: str) -> bool:
        """The trainer has the outcome in its journal. False if there is no outcome to acknowledge.

        Raises UnknownEpisodeError.
        """
        episode = self.get(uuid)
        if episode.state == "ended":
            self._move(episode, "accepted")
        elif episode.state == "failed":
            self._touch(episode)
        else:
            return episode.state == "accepted"
        episode.acknowledged = True
        episode.payload = episode.result = b""
        return True

    # The machine's parts

    def _move(self, episode: Episode, state: State) -> None:
        if state not in TRANSITIONS[episode.state]:
            raise ConflictError(f"episode {episode.uuid!r} cannot go from {episode.state} to {state}")
        self._count(episode, -1)
        episode.state = state
        self._count(episode, +1)
        self._touch(episode)
        if state == "registered":
            self._enqueue(episode)

    def _close_claim(self, episode: Episode, state: State) -> None:
        owned = self._claims_of[episode.client_uuid]
        del owned[episode.uuid]
        if not owned:
            del self._claims_of[episode.client_uuid]
        self._changes.closed.append(ClosedClaim(episode, episode.attempt, counts=state == "ended"))
        self._move(episode, state)

    def _lose(self, episode: Episode, failure: Failure) -> None:
        episode.failures.append(failure)
        self._close_claim(episode, "registered" if episode.attempt < self._max_attempts else "failed")

    def _failure_of(self, episode: Episode, kind: str, message: str) -> Failure:
        return Failure(kind=kind, message=message, attempt=episode.attempt, client_uuid=episode.client_uuid)

    def _start_lease(self, episode: Episode) -> None:
        self.renew(episode)
        self._claims_of.setdefault(episode.client_uuid, {})[episode.uuid] = episode
        heapq.heappush(self._leases, (episode.deadline, episode.uuid, episode.attempt))

    def _enqueue(self, episode: Episode) -> None:
        heapq.heappush(self._queues[episode.episode_type], (episode.sequence, episode.uuid))

    def _oldest(self, claim_type: ClaimType, not_before_by: str) -> Episode | None:
        """Take the oldest registered episode off its queue; entries that no longer hold are dropped here."""
        queues = [self._queues[kind] for kind in _kinds(claim_type)]
        passed_over = list[Episode]()
        found = None
        while found is None and any(queues):
            _, uuid = heapq.heappop(min((queue for queue in queues if queue), key=lambda queue: queue[0]))
            episode = self._episodes[uuid]
            if episode.state != "registered":
                continue
            if not_before_by and not_before_by in episode.claimants:
                passed_over.append(episode)
            else:
                found = episode
        for episode in passed_over:
            self._enqueue(episode)
        return found

    def _count(self, episode: Episode, step: int) -> None:
        counts = self._counts[episode.episode_type]
        setattr(counts, episode.state, getattr(counts, episode.state) + step)

    def _touch(self, episode: Episode) -> None:
        if episode.uuid not in self._changes.added:
            self._changes.saved[episode.uuid] = episode


def _kinds(claim_type: ClaimType) -> tuple[EpisodeType, ...]:
    return EPISODE_TYPES if claim_type == "any" else (claim_type,)


def _attempt_of(episode: Episode, client_uuid: str, attempt: int | None) -> int:
    """The number of the client's claim. A first-version client names none: its only claim is meant."""
    if attempt is not None:
        if not 1 <= attempt <= episode.attempt or episode.claimants[attempt - 1] != client_uuid:
            raise NotTheOwnerError(
                f"client {client_uuid!r} does not own claim {attempt} of episode {episode.uuid}"
            )
        return attempt
    numbers = [number for number, owner in enumerate(episode.claimants, 1) if owner == client_uuid]
    if len(numbers) != 1:
        what = (
            "never claimed"
            if not numbers
            else "claimed more than once, so the request must name the attempt of,"
        )
        raise NotTheOwnerError(f"client {client_uuid!r} {what} episode {episode.uuid}")
    return numbers[0]
