"""Failed episodes as an operator sees them: read, try again, drop.

Invariant: a failure that a trainer may have in its journal stands. It may from the moment that it is sent;
`offer` marks the episode, and the mark is committed before the sending.

All episodes of a run: who may claim, renew, end and abort which, and in what order they are handed out.

Invariants: an episode ends exactly once (`accepted`, or `failed` with a reason for every attempt), and a
result counts only from the claim that holds the lease. Pure: no I/O, no asyncio, the clocks are injected.
Each operation costs O(log n), pages for an operator aside; what it changed is collected until `take_changes`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from tinkerscript.errors import ConflictError, NotTheOwnerError
from tinkerscript.protocol import TRAINER_POOL, ClaimType, EpisodeType, Failure
from tinkerscript.server.episodes.indexes import Ledger, page
from tinkerscript.server.episodes.record import CANCELLED, Changes, EpisodeRecord, content_digest


class DeadLetters:
    """The failed episodes of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def page(self, *, after: int, limit: int) -> list[EpisodeRecord]:
        """Failed episodes that nobody has dropped, by sequence, from the first one past `after`."""
        letters = sorted(self._ledger.dead_letters.values(), key=attrgetter("sequence"))
        return page(letters, after=after, limit=limit)

    def offer(self, uuid: str) -> EpisodeRecord:
        """The failure is about to be sent to a trainer. Raises UnknownEpisodeError."""
        episode = self._ledger.get(uuid)
        if not episode.offered:
            episode.offered = True
            self._ledger.touch(episode)
        return episode

    def retry(self, uuid: str) -> EpisodeRecord:
        """Register a failed episode again with a fresh budget of attempts; its failures are kept.

        Raises UnknownEpisodeError, or ConflictError for one that is not failed or whose failure stands.
        """
        episode = self._failed(uuid)
        if episode.acknowledged:
            raise ConflictError(
                f"the failure of episode {uuid!r} is in the trainer's journal and its group is closed: an "
                "episode ends exactly once"
            )
        if episode.offered:
            raise ConflictError(
                f"the failure of episode {uuid!r} was sent to the trainer, which may have it in its journal: "
                "an episode ends exactly once"
            )
        if episode.failures[-1].kind == CANCELLED:
            raise ConflictError(f"episode {uuid!r} was cancelled: {episode.failures[-1].message}")
        episode.forgiven = episode.attempt
        self._ledger.move(episode, "registered")
        return episode

    def drop(self, uuid: str) -> EpisodeRecord:
        """Take a failed episode off the list. Repeated it changes nothing.

        One that the trainer has not acknowledged may go only if it is of a client's own pool: no trainer
        waits for that one, and the drop acknowledges it in the trainer's place.
        Raises UnknownEpisodeError, or ConflictError with the reason.
        """
        episode = self._failed(uuid)
        if not episode.acknowledged:
            if episode.pool == TRAINER_POOL:
                raise ConflictError(
                    f"the trainer registered episode {uuid!r} and has not acknowledged its failure yet: its "
                    "group waits for it"
                )
            self._ledger.acknowledge(episode)
        if not episode.dropped:
            episode.dropped = True
            del self._ledger.dead_letters[episode.sequence]
            self._ledger.touch(episode)
        return episode

    def _failed(self, uuid: str) -> EpisodeRecord:
        episode = self._ledger.get(uuid)
        if episode.state != "failed":
            raise ConflictError(f"episode {uuid!r} is {episode.state}, not failed")
        return episode


class EpisodeBook:
    """All episodes of one run."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_attempts: int,
        max_claim_s: float = math.inf,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` measures leases and `wall` (Unix time) the lifetime of claims, also over a restart."""
        ledger = Ledger(clock=clock, wall=wall, max_claim_s=max_claim_s)
        self.census = ledger.census
        self.dead_letters = DeadLetters(ledger)
        self._ledger = ledger
        self._max_attempts = max_attempts

    # Reading

    def get(self, uuid: str) -> EpisodeRecord:
        """Raises UnknownEpisodeError."""
        return self._ledger.get(uuid)

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return iter(self._ledger.episodes.values())

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._ledger.episodes

    def __len__(self) -> int:
        return len(self._ledger.episodes)

    def claimable(self, pool: str, claim_type: ClaimType) -> int:
        """How many episodes are registered for a claim of this pool and type."""
        return self._ledger.queues.claimable(pool, claim_type)

    def claims_held(self, client_uuid: str) -> int:
        """How many claims the client holds."""
        return len(self._ledger.claims_of.get(client_uuid, ()))

    @property
    def active_clients(self) -> int:
        """Clients that hold a claim."""
        return len(self._ledger.claims_of)

    def answered(self, client_uuid: str, claim_request_id: str) -> list[EpisodeRecord] | None:
        """The episodes that this request was answered with and whose claims still hold.

        None for a request that was never answered with an episode.
        """
        return self._ledger.requests.answered((client_uuid, claim_request_id)) if claim_request_id else None

    def unfinished(self, *, after: int, limit: int) -> list[EpisodeRecord]:
        """Episodes that are not over and acknowledged, by sequence, from the first one past `after`."""
        return page(self._ledger.unfinished.values(), after=after, limit=limit)

    def next_deadline(self) -> float | None:
        """When to call `expire` next, on the book's clock; None while nothing is claimed."""
        return self._ledger.leases.next_deadline()

    def left_s(self, episode: EpisodeRecord) -> float:
        """Seconds after which the last claim is over, however active it is."""
        return max(0.0, episode.ends_at - self._ledger.clock())

    def last_activity(self, episode: EpisodeRecord) -> float:
        """Unix time of the last claim's last activity; 0 before the first claim."""
        if not episode.renewed_at:
            return episode.claimed_at
        idle_s = 0.0 if episode.calls_in_flight else self._ledger.clock() - episode.renewed_at
        return max(episode.claimed_at, self._ledger.wall() - idle_s)

    def why_lost(self, episode: EpisodeRecord, attempt: int) -> str:
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
        return self._ledger.take_changes()

    # Mutations

    def restore(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Fill an empty book with stored episodes; leases begin anew, since nobody could renew them."""
        self._ledger.restore(episodes)

    def register(
        self,
        uuid: str,
        episode_type: EpisodeType,
        group_id: str,
        payload: bytes,
        *,
        pool: str = TRAINER_POOL,
        group_size: int = 0,
    ) -> EpisodeRecord:
        """Add an episode. Repeated with the same content it changes nothing.

        Raises ConflictError if the uuid is known with other content.
        """
        digest = content_digest(
            episode_type.encode(), group_id.encode(), payload, pool.encode(), b"%d" % group_size
        )
        known = self._ledger.episodes.get(uuid)
        if known is not None:
            if known.digest != digest:
                raise ConflictError(f"episode {uuid!r} is already registered with other content")
            return known
        episode = EpisodeRecord(
            uuid=uuid,
            sequence=self._ledger.next_sequence(),
            episode_type=episode_type,
            group_id=group_id,
            digest=digest,
            payload=payload,
            pool=pool,
            group_size=group_size,
        )
        self._ledger.add(episode)
        return episode

    def claim(
        self,
        client_uuid: str,
        claim_type: ClaimType,
        lease_s: float,
        *,
        pool: str = TRAINER_POOL,
        policy_version: int = 0,
        may_repeat: bool = True,
        claim_request_id: str = "",
    ) -> EpisodeRecord | None:
        """Hand out the oldest registered episode, or None. Episodes that lost a claim are the oldest.

        With `may_repeat=False` the client is never given an episode that it claimed before. Whether the
        request was answered before is for the caller to look up: see `answered`.
        """
        episode = self._ledger.queues.oldest(pool, claim_type, "" if may_repeat else client_uuid)
        if episode is None:
            return None
        episode.policy_version = policy_version
        self._ledger.open_claim(episode, client_uuid, claim_request_id, lease_s)
        return episode

    def renew(self, episode: EpisodeRecord) -> None:
        """The claim that holds the lease showed activity."""
        episode.renewed_at = self._ledger.clock()

    def begin_call(self, episode: EpisodeRecord) -> None:
        """A model call of the claim that holds the lease begins: the lease does not lapse before its end."""
        episode.calls_in_flight += 1
        self.renew(episode)

    def end_call(self, episode: EpisodeRecord, attempt: int) -> None:
        """The call of this claim is over: its lease begins anew, if the claim has not been lost meanwhile."""
        if episode.state == "claimed" and episode.attempt == attempt:
            episode.calls_in_flight -= 1
            self.renew(episode)

    def held(self, uuid: str, client_uuid: str, attempt: int | None) -> EpisodeRecord:
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
    ) -> EpisodeRecord:
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
        self._ledger.close_claim(episode, "ended")
        return episode

    def abort(self, uuid: str, client_uuid: str, attempt: int | None, failure: Failure) -> EpisodeRecord:
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

    def release_client(self, client_uuid: str, reason: str) -> list[EpisodeRecord]:
        """The client is dead: all its claims are lost at once."""
        held = list(self._ledger.claims_of.get(client_uuid, {}).values())
        for episode in held:
            self._lose(episode, self._failure_of(episode, "worker_died", reason))
        return held

    def expire(self) -> list[EpisodeRecord]:
        """Take the claims whose lease or lifetime has run out; returns their episodes."""
        expired = list[EpisodeRecord]()
        while (episode := self._ledger.leases.lapsed()) is not None:
            if episode.ends_at <= self._ledger.clock():
                kind, message = "claim_expired", f"a claim lasts {self._ledger.max_claim_s:g} s at most"
            else:
                kind, message = "lease_expired", f"no activity for {episode.lease_s:g} s"
            self._lose(episode, self._failure_of(episode, kind, message))
            expired.append(episode)
        return expired

    def cancel(self, uuid: str, reason: str) -> bool:
        """The episode is not needed any more. False if it is over already: its outcome stands.

        Raises UnknownEpisodeError.
        """
        episode = self.get(uuid)
        if episode.state == "registered":
            episode.failures.append(Failure(kind=CANCELLED, message=reason))
            self._ledger.move(episode, "failed")
        elif episode.state == "claimed":
            episode.failures.append(self._failure_of(episode, CANCELLED, reason))
            self._ledger.close_claim(episode, "failed")
        else:
            return False
        return True

    def acknowledge(self, uuid: str) -> bool:
        """The trainer has the outcome in its journal. False if there is no outcome to acknowledge.

        Raises UnknownEpisodeError.
        """
        episode = self.get(uuid)
        if episode.state not in ("ended", "failed"):
            return episode.state == "accepted"
        if not episode.acknowledged:
            self._ledger.acknowledge(episode)
        return True

    # The machine's parts

    def _lose(self, episode: EpisodeRecord, failure: Failure) -> None:
        episode.failures.append(failure)
        used = episode.attempt - episode.forgiven
        self._ledger.close_claim(episode, "registered" if used < self._max_attempts else "failed")

    def _failure_of(self, episode: EpisodeRecord, kind: str, message: str) -> Failure:
        return Failure(kind=kind, message=message, attempt=episode.attempt, client_uuid=episode.client_uuid)


def _attempt_of(episode: EpisodeRecord, client_uuid: str, attempt: int | None) -> int:
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
