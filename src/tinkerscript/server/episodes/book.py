"""`EpisodeBook`: every episode of a run, and who may change it, and how. It does no I/O.

An episode ends exactly once (`ended`, or `failed` with a reason for every attempt); a result counts only from
the claim that holds the lease; a failure that a trainer may have used is final. The book holds all episodes
that are not consumed and about the last `KEPT` consumed ones; the ledger has the rest (`recall`). Operations
cost O(log n), except an operator's pages. They raise UnknownEpisodeError for a uuid that the book does not
hold, and NotTheOwnerError for a claim without the lease.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import nlargest
from itertools import islice
from operator import attrgetter, itemgetter

from tinkerscript.errors import ConflictError, NotTheOwnerError, UnknownEpisodeError
from tinkerscript.ledger.rows import Use
from tinkerscript.protocol import HANDED_BACK, TRAINER_POOL, ClaimType, EpisodeType, Failure, uuids_of_copies
from tinkerscript.server.episodes.indexes import ClaimRequests, Leases, Queues, StateCounts, StoredEpisodes
from tinkerscript.server.episodes.record import (
    CANCELLED,
    CLIENT_GONE,
    CLIENT_STOPPED,
    TRANSITIONS,
    UNDELIVERABLE,
    WORKER_DIED,
    Changes,
    ClosedClaim,
    EpisodeRecord,
    State,
    attempt_row,
    content_digest,
)

# Not the attempt's fault. After `MAX_FORGIVEN` they do count, so that every episode ends.
FORGIVEN_KINDS = (HANDED_BACK, CLIENT_GONE, CLIENT_STOPPED)
MAX_FORGIVEN = 20

KEPT = 10_000  # Clients may still ask about recent ones.

# After these outcomes in undone steps (None: unused), a client's sample cannot train again.
LOST_TO_CLIENTS = (None, Use.SET_ASIDE, Use.LEFT_OUT, Use.STALE)


class EpisodeBook:
    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_attempts: int,
        max_claim_s: float = math.inf,
        wall: Callable[[], float] = time.time,
        kept: int = KEPT,
    ) -> None:
        """`clock` measures leases, `wall` (Unix time) claims' lifetimes across restarts."""
        self.leases = Leases(clock, wall, max_claim_s=max_claim_s)
        self.queues = Queues(self.get)
        self.counts = StateCounts()
        self.kept = kept
        self._requests = ClaimRequests()
        self._wall = wall
        self._max_attempts = max_attempts
        self._episodes: dict[str, EpisodeRecord] = {}
        self._unfinished: dict[int, EpisodeRecord] = {}
        self.open_ends: dict[int, EpisodeRecord] = {}
        """Episodes that are over but not consumed, by end number."""

        self._failed: dict[int, EpisodeRecord] = {}
        """Episodes that were not dropped, in order of failure."""

        self._consumed = deque[str]()
        self._claims: dict[str, dict[str, EpisodeRecord]] = {}
        """Running claims: client -> episode uuid -> episode."""

        self._claimed: dict[str, EpisodeRecord] = {}
        self._changes = Changes()
        self._next_sequence = 1
        self._next_end = 1

    def get(self, uuid: str) -> EpisodeRecord:
        try:
            return self._episodes[uuid]
        except KeyError:
            raise UnknownEpisodeError(f"this server holds no episode {uuid!r}") from None

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return iter(self._episodes.values())

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._episodes

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def active_clients(self) -> int:
        return len(self._claims)

    def claims_held(self, client_uuid: str) -> int:
        return len(self._claims.get(client_uuid, ()))

    def clients_named(self, prefix: str) -> list[str]:
        return [client for client in self._claims if client.startswith(prefix)]

    @property
    def claims_in_all(self) -> int:
        return len(self._claimed)

    def oldest_claims(self, limit: int) -> list[EpisodeRecord]:
        return list(islice(self._claimed.values(), limit))

    def busiest_clients(self, limit: int) -> list[tuple[str, int]]:
        held = ((client, len(claims)) for client, claims in self._claims.items())
        return nlargest(limit, held, key=itemgetter(1))

    @property
    def failed_in_all(self) -> int:
        return len(self._failed)

    def latest_failed(self, limit: int) -> list[EpisodeRecord]:
        return list(islice(reversed(self._failed.values()), limit))

    def answered(self, client_uuid: str, claim_request_id: str) -> list[EpisodeRecord] | None:
        """Episodes that answered this request and are still held; None if it is new."""
        return self._requests.answered((client_uuid, claim_request_id)) if claim_request_id else None

    def unfinished(self, *, after: int, limit: int) -> list[EpisodeRecord]:
        return _page(self._unfinished.values(), after=after, limit=limit)

    def failed(self, *, after: int, limit: int) -> list[EpisodeRecord]:
        failed = sorted(self._failed.values(), key=attrgetter("sequence"))
        return _page(failed, after=after, limit=limit)

    def take_changes(self) -> Changes:
        changes, self._changes = self._changes, Changes()
        return changes

    def restore(self, stored: StoredEpisodes) -> None:
        """Fill an empty book. Leases start anew."""
        for (pool, kind, state), number in stored.past.items():
            self.counts.past(pool, kind, state, number)
        claimed = list[EpisodeRecord]()
        for episode in stored.present:
            self._enter(episode)
            if episode.state == "claimed":
                claimed.append(episode)
            if episode.consumed:
                self._consumed.append(episode.uuid)
        self._next_sequence, self._next_end = stored.last_sequence + 1, stored.last_end + 1
        for episode in sorted(claimed, key=attrgetter("claimed_at")):
            self._start_claim(episode)
        self._requests.restore(self._episodes.values())

    def recall(self, episodes: Iterable[EpisodeRecord]) -> None:
        for episode in episodes:
            if episode.uuid not in self._episodes:
                self._episodes[episode.uuid] = episode
                self._consumed.append(episode.uuid)

    def register(
        self,
        uuid: str,
        episode_type: EpisodeType,
        group_id: str,
        payload: bytes,
        *,
        pool: str = TRAINER_POOL,
        group_size: int = 0,
        step: int = 0,
        label: str = "",
        position: int = -1,
        copies: int = 1,
    ) -> None:
        """Add an episode and its copies. Idempotent.

        Raises ConflictError, and adds none, if one has other content. `recall` past ones first.
        """
        digest = content_digest(
            episode_type.encode(), group_id.encode(), payload, pool.encode(), b"%d" % group_size
        )
        uuids = uuids_of_copies(uuid, copies)
        known = {each for each in uuids if each in self._episodes}
        for each in known:
            if self._episodes[each].digest != digest:
                raise ConflictError(f"episode {each!r} is already registered with other content")
        sample = content_digest(payload) if len(known) < copies else b""
        for each in uuids:
            if each in known:
                continue
            episode = EpisodeRecord(
                uuid=each,
                sequence=self._next_sequence,
                episode_type=episode_type,
                group_id=group_id,
                digest=digest,
                payload=payload,
                sample=sample,
                pool=pool,
                group_size=group_size,
                step=step,
                label=label,
                position=position,
                queued_at=self._wall(),
            )
            self._next_sequence += 1
            self._enter(episode)
            self._changes.added[each] = episode

    def cancel(self, uuid: str, reason: str) -> bool:
        """Return False if the episode is over."""
        episode = self.get(uuid)
        if episode.state == "registered":
            self._note_failure(episode, Failure(kind=CANCELLED, message=reason))
            self._move(episode, "failed")
        elif episode.state == "claimed":
            self._note_failure(episode, _failure_of(episode, CANCELLED, reason))
            self._close_claim(episode, "failed")
        else:
            return False
        return True

    def offer_failure(self, uuid: str) -> EpisodeRecord:
        """A trainer knows the failure, so it is final."""
        episode = self.get(uuid)
        if not episode.offered:
            episode.offered = True
            self._touch(episode)
        return episode

    def consume(self, sequence: int) -> None:
        """Ignores episodes that have not ended."""
        episode = self._unfinished.get(sequence)
        if episode is not None and episode.end_number is not None:
            self._consume(episode)

    def resume(
        self,
        step: int,
        resumption: int,
        used: Mapping[int, str],
        *,
        plan_lag: int = 0,
        spoiled: Collection[int] = (),
    ) -> list[EpisodeRecord]:
        """Resume the run after `step`: keep what its next step can use, and give up the rest.

        `used` and `spoiled`: see `Beginning`. `plan_lag`: see `Resume`. Returns the episodes given up, now
        consumed. Consumed ones that can train again become open.
        """
        first = max(1, step + 1 - plan_lag)
        kept, given_up = list[EpisodeRecord](), list[EpisodeRecord]()
        groups: dict[str, list[EpisodeRecord]] = {}
        for episode in self._episodes.values():
            is_training = episode.episode_type == "train"
            if episode.pool != TRAINER_POOL:
                was = used.get(episode.sequence)
                if is_training and was not in LOST_TO_CLIENTS and not episode.emptied:
                    kept.append(episode)
            elif is_training and first <= episode.step <= step + 1 and not episode.undone:
                groups.setdefault(episode.group_id, []).append(episode)
            elif not is_training or episode.step:  # Not planned by a trainer.
                is_cut_short = not is_training and not episode.consumed
                if (episode.step > step or is_cut_short) and not episode.undone:
                    episode.undone = resumption
                    self._touch(episode)
                if not episode.consumed:
                    given_up.append(episode)
        for group in groups.values():
            is_spoiled = any(episode.sequence in spoiled for episode in group)
            (kept if _can_train(group, used) and not is_spoiled else given_up).extend(group)
            for episode in group if is_spoiled else ():  # Its sample is asked again.
                episode.undone = resumption
                self._touch(episode)
        for episode in kept:
            if episode.consumed:
                self._reopen(episode)
        given_up = [episode for episode in given_up if not episode.consumed]
        for episode in given_up:
            if episode.end_number is None:
                self.cancel(episode.uuid, "the run was resumed before the step of this episode")
            self._consume(episode)
        return given_up

    def planned(self, step: int, *, plan_lag: int = 0) -> list[EpisodeRecord]:
        """Reaches back `plan_lag` steps."""
        found = (
            each
            for each in self._unfinished.values()
            if each.pool == TRAINER_POOL and step - plan_lag <= each.step <= step and _is_planned(each)
        )
        return sorted(found, key=attrgetter("sequence"))  # Reopened episodes come last.

    def planned_groups(self, step: int, used: Mapping[int, str]) -> int:
        """Count groups, except those set aside."""
        planned = [each for each in self._episodes.values() if each.step == step and _is_planned(each)]
        aside = {each.group_id for each in planned if used.get(each.sequence) == Use.SET_ASIDE}
        return len({each.group_id for each in planned} - aside)

    def claim(
        self,
        client_uuid: str,
        claim_type: ClaimType,
        lease_s: float,
        *,
        pool: str = TRAINER_POOL,
        policy_version: int = 0,
        claim_request_id: str = "",
    ) -> EpisodeRecord | None:
        """Hand out the oldest registered episode; requeued ones keep their place. Check `answered` first."""
        episode = self.queues.oldest(pool, claim_type)
        if episode is None:
            return None
        self._move(episode, "claimed")
        episode.claimants.append(client_uuid)
        episode.request_ids.append(claim_request_id)
        episode.policy_version = policy_version
        episode.lease_s = lease_s
        episode.claimed_at = self._wall()
        waited = episode.claimed_at - episode.queued_at
        episode.queued_s = max(0.0, waited) if episode.queued_at else None
        self._touch_attempt(episode, episode.attempt)
        self._changes.claimed.append((episode.sequence, episode.attempt))
        self._start_claim(episode)
        self._requests.claimed(episode)
        return episode

    def held(self, uuid: str, attempt: int) -> EpisodeRecord:
        """Renew the lease."""
        episode = self.get(uuid)
        _check_holds(episode, attempt)
        self.leases.renew(episode)
        return episode

    def end(
        self, uuid: str, attempt: int, *, reward: float, result: bytes, is_success: bool | None = None
    ) -> EpisodeRecord:
        """Store a claim's result. Idempotent; raises ConflictError for a different result."""
        episode = self.get(uuid)
        digest = content_digest(result)
        if attempt == episode.attempt and episode.state == "ended":
            if episode.result_digest != digest:
                raise ConflictError(f"episode {uuid!r} has already ended with another result")
            return episode
        _check_holds(episode, attempt)
        episode.reward, episode.result, episode.result_digest = reward, result, digest
        episode.is_success = is_success
        self._close_claim(episode, "ended")
        return episode

    def abort(self, uuid: str, attempt: int, failure: Failure) -> EpisodeRecord:
        """Requeue the episode, or fail it if no attempt is left. Idempotent."""
        episode = self.get(uuid)
        owner = episode.claimants[attempt - 1] if 1 <= attempt <= episode.attempt else ""
        failure = failure.model_copy(update={"attempt": attempt, "client_uuid": owner})
        if failure not in episode.failures:
            _check_holds(episode, attempt)
            self._lose(episode, failure, fault=f"{failure.kind}: {failure.message}")
        return episode

    def poison(self, uuid: str, attempt: int, failure: Failure) -> None:
        """Fail an episode that no claim could finish."""
        episode = self.get(uuid)
        _check_holds(episode, attempt)
        failure = failure.model_copy(update={"attempt": attempt, "client_uuid": episode.client_uuid})
        self._note_failure(episode, failure)
        self._close_claim(episode, "failed")

    def give_up(self, uuid: str, reason: str) -> EpisodeRecord:
        """Fail an ended episode with a result too large to deliver.

        Raises ConflictError if it has not ended or is consumed.
        """
        episode = self.get(uuid)
        if episode.status != "ended":
            raise ConflictError(f"episode {uuid!r} is {episode.status}, not ended")
        self._note_failure(episode, _failure_of(episode, UNDELIVERABLE, reason))
        self._move(episode, "failed")
        return episode

    def release_client(
        self, client_uuid: str, reason: str, *, kind: str = WORKER_DIED
    ) -> list[EpisodeRecord]:
        held = list(self._claims.get(client_uuid, {}).values())
        for episode in held:
            self._lose(episode, _failure_of(episode, kind, reason))
        return held

    def expire(self) -> list[EpisodeRecord]:
        """Returns the episodes of closed claims."""
        closed = list[EpisodeRecord]()
        while (found := self.leases.find_expired()) is not None:
            episode, kind, message = found
            self._lose(episode, _failure_of(episode, kind, message), fault=message)
            closed.append(episode)
        return closed

    def retry(self, uuid: str) -> EpisodeRecord:
        """Requeue a failed episode with new attempts. Raises ConflictError with the reason."""
        episode = self._get_failed(uuid)
        if stands := episode.why_failure_stands():
            raise ConflictError(stands)
        episode.forgiven = episode.attempt
        self._move(episode, "registered")
        return episode

    def empty(self, uuids: Iterable[str]) -> set[str]:
        """Mark the consumed ones as emptied, so that they cannot train again. Returns their uuids."""
        emptied = [each for each in map(self.get, uuids) if each.consumed]
        for episode in emptied:
            episode.emptied = True
        return {episode.uuid for episode in emptied}

    def drop(self, uuid: str) -> EpisodeRecord:
        """Remove a failed episode from the list of failures. Idempotent.

        In a client's pool, where no trainer waits for it, this also consumes it. Raises ConflictError.
        """
        episode = self._get_failed(uuid)
        if not episode.consumed:
            if episode.pool == TRAINER_POOL:
                raise ConflictError(
                    f"the trainer registered episode {uuid!r} and has not used its failure yet: its group "
                    "waits for it"
                )
            self._consume(episode)
        if not episode.dropped:
            episode.dropped = True
            self._failed.pop(episode.sequence, None)
            self._touch(episode)
        return episode

    def _get_failed(self, uuid: str) -> EpisodeRecord:
        episode = self.get(uuid)
        if episode.state != "failed":
            raise ConflictError(f"episode {uuid!r} is {episode.status}, not failed")
        return episode

    def _enter(self, episode: EpisodeRecord) -> None:
        self._episodes[episode.uuid] = episode
        self.counts.count(episode, +1)
        if not episode.consumed:
            self.counts.begun(episode)
            self._unfinished[episode.sequence] = episode
            if episode.end_number is not None:
                self.open_ends[episode.end_number] = episode
        if episode.state == "registered":
            self.queues.put(episode)
        elif episode.state == "failed" and not episode.dropped:
            self._failed[episode.sequence] = episode

    def _move(self, episode: EpisodeRecord, state: State) -> None:
        if state not in TRANSITIONS[episode.state]:
            raise ConflictError(f"episode {episode.uuid!r} cannot go from {episode.state} to {state}")
        if episode.state == "registered":
            self.queues.remove(episode)
        elif episode.state == "failed":
            self._failed.pop(episode.sequence, None)
        self.counts.count(episode, -1)
        episode.state = state
        self.counts.count(episode, +1)
        if state != "claimed":
            self._touch(episode)
        if state == "registered":
            self._forget_end(episode)
            episode.queued_at = self._wall()
            self.queues.put(episode)
        elif state == "failed":
            self._failed[episode.sequence] = episode
        if state in ("ended", "failed") and episode.end_number is None:
            episode.end_number, episode.ended_at = self._next_end, self._wall()
            self._next_end += 1
            self.open_ends[episode.end_number] = episode

    def _forget_end(self, episode: EpisodeRecord) -> None:
        if episode.end_number is not None:
            del self.open_ends[episode.end_number]
            episode.end_number = episode.ended_at = None

    def _touch(self, episode: EpisodeRecord) -> None:
        if episode.uuid not in self._changes.added:
            self._changes.saved[episode.uuid] = episode

    def _note_failure(self, episode: EpisodeRecord, failure: Failure) -> None:
        episode.failures.append(failure)
        self._touch_attempt(episode, failure.attempt)

    def _touch_attempt(self, episode: EpisodeRecord, attempt: int) -> None:
        self._changes.attempts[episode.sequence, attempt] = attempt_row(episode, attempt)

    def _start_claim(self, episode: EpisodeRecord) -> None:
        self.leases.start(episode)
        self._claims.setdefault(episode.client_uuid, {})[episode.uuid] = episode
        self._claimed[episode.uuid] = episode

    def _close_claim(self, episode: EpisodeRecord, state: State, *, fault: str = "") -> None:
        owned = self._claims[episode.client_uuid]
        del owned[episode.uuid], self._claimed[episode.uuid]
        if not owned:
            del self._claims[episode.client_uuid]
        self._requests.closed(episode)
        self._changes.closed.append(ClosedClaim(episode, episode.attempt, state == "ended", fault))
        self._move(episode, state)

    def _lose(self, episode: EpisodeRecord, failure: Failure, *, fault: str = "") -> None:
        if failure.kind in FORGIVEN_KINDS and _forgiven(episode) < MAX_FORGIVEN:
            episode.forgiven += 1
            fault = ""
        self._note_failure(episode, failure)
        used = episode.attempt - episode.forgiven
        self._close_claim(episode, "registered" if used < self._max_attempts else "failed", fault=fault)

    def _consume(self, episode: EpisodeRecord) -> None:
        self._set_consumed(episode, True)
        self.counts.finished(episode)
        episode.payload = episode.result = b""
        del self._unfinished[episode.sequence]
        assert episode.end_number is not None
        del self.open_ends[episode.end_number]
        self._consumed.append(episode.uuid)
        if len(self._consumed) > 2 * self.kept:
            self._let_go(self.kept)

    def _let_go(self, number: int) -> None:
        for uuid in [self._consumed.popleft() for _ in range(number)]:
            episode = self._episodes.get(uuid)
            if episode is None or not episode.consumed:
                continue
            if episode.state == "failed" and not episode.dropped and episode.last_failure != CANCELLED:
                continue
            del self._episodes[uuid]
            self._failed.pop(episode.sequence, None)

    def _reopen(self, episode: EpisodeRecord) -> None:
        self._set_consumed(episode, False)
        self.counts.begun(episode)
        self._unfinished[episode.sequence] = episode
        assert episode.end_number is not None
        self.open_ends[episode.end_number] = episode

    def _set_consumed(self, episode: EpisodeRecord, consumed: bool) -> None:
        self._changes.consumed[episode.sequence] = consumed
        changes_status = episode.state == "ended"
        if changes_status:
            self.counts.count(episode, -1)
        episode.consumed = consumed
        if changes_status:
            self.counts.count(episode, +1)


def _is_planned(episode: EpisodeRecord) -> bool:
    return episode.step > 0 and episode.episode_type == "train" and not episode.undone


def _can_train(group: list[EpisodeRecord], used: Mapping[int, str]) -> bool:
    """Whether no member was cancelled, set aside, given up or emptied, and not every result was left out or
    stale.
    """
    for episode in group:
        is_cancelled = episode.state == "failed" and episode.failures[-1].kind == CANCELLED
        gone = episode.consumed and used.get(episode.sequence, Use.SET_ASIDE) in (Use.SET_ASIDE, Use.GIVEN_UP)
        if is_cancelled or gone or episode.emptied:
            return False
    return any(
        each.state != "ended" or used.get(each.sequence) not in (Use.LEFT_OUT, Use.STALE) for each in group
    )


def _forgiven(episode: EpisodeRecord) -> int:
    return sum(failure.kind in FORGIVEN_KINDS for failure in episode.failures)


def _check_holds(episode: EpisodeRecord, attempt: int) -> None:
    if lost := episode.why_lost(attempt):
        raise NotTheOwnerError(lost)


def _failure_of(episode: EpisodeRecord, kind: str, message: str) -> Failure:
    return Failure(kind=kind, message=message, attempt=episode.attempt, client_uuid=episode.client_uuid)


def _page(episodes: Iterable[EpisodeRecord], *, after: int, limit: int) -> list[EpisodeRecord]:
    return list(islice((episode for episode in episodes if episode.sequence > after), limit))
