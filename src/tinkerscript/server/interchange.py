"""`Interchange`: hands out episodes, and commits every change of the book before anyone hears of it.

Code that changes the book calls `settle` without an await in between, and answers after `commit`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinkerscript.errors import NotTheOwnerError, QuotaError, UnauthorizedError
from tinkerscript.ledger import Ledger
from tinkerscript.ledger.rows import AttemptRow, EpisodeRow
from tinkerscript.limits import CLAIMED_BYTES, EPISODE_BYTES, POOL_BYTES, Totals
from tinkerscript.logs import about
from tinkerscript.protocol import (
    NO_EPISODES,
    RUN_FINISHED,
    WEIGHT_SYNCING,
    ClaimEpisodeRequest,
    ClaimType,
    EngineStatus,
    Failure,
    own_clients,
)
from tinkerscript.rollouts.call import FOREIGN_POLICY
from tinkerscript.server.clients import Clients, RunEnd
from tinkerscript.server.episodes.book import KEPT, EpisodeBook
from tinkerscript.server.episodes.indexes import (
    LongPollQueue,
    PastCounts,
    RequestKey,
    StoredEpisodes,
    Wakeup,
)
from tinkerscript.server.episodes.record import (
    CLIENT_GONE,
    CLIENT_STOPPED,
    Claim,
    ClosedClaim,
    EpisodeRecord,
    restored,
    write_changes,
)
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.trainer_link.messages import BatchProgress, Hello, NewEpisode, check_episode

ROLLING: EngineStatus = "ENGINE.ROLLING"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineState:
    status: EngineStatus = "ENGINE.OFFLINE"
    without_trainer: EngineStatus = "ENGINE.OFFLINE"
    policy_version: int = 0
    global_step: int = 0
    model: str = ""
    run_finished: bool = False
    failure: str = ""
    usable_versions: frozenset[int] | None = None
    """None: all may train."""

    client_samples: bool = True
    batch: BatchProgress | None = None
    booting: bool = False


class Interchange:
    def __init__(
        self,
        *,
        book: EpisodeBook,
        ledger: Ledger,
        metrics: ServerMetrics,
        forget: Iterable[Callable[[str, int], None]],
        clock: Callable[[], float],
        clients: Clients | None = None,
        totals: Totals | None = None,
        keeps_failed_calls: bool = False,
    ) -> None:
        """Each of `forget` gets the uuid and attempt of every closed claim.

        `keeps_failed_calls`: calls of claims that do not count stay in the ledger.
        """
        self.book = book
        self.engine = EngineState()
        self.on_ended: Callable[[list[int]], None] = lambda numbers: None
        self.committed_end = 0
        self._last_end = 0
        self._ledger = ledger
        self._metrics = metrics
        self._forget = tuple(forget)
        self._clock = clock
        self.clients = clients or Clients(clock)
        self.run_end = RunEnd(self.clients)
        self._totals = totals or Totals()
        self._keeps_failed_calls = keeps_failed_calls
        self._long_polls = LongPollQueue()
        self._polling: Counter[str] = Counter()
        engine = self.engine
        metrics.watch("waiting_clients", "Clients in long polls.", lambda: len(self._long_polls))
        metrics.watch("policy_version", "Version of the newest weights.", lambda: engine.policy_version)
        metrics.watch("global_step", "Last step of the trainer.", lambda: engine.global_step)
        metrics.watch("rolling", "Whether episodes are handed out.", lambda: engine.status == ROLLING)
        metrics.watch("run_finished", "Whether the run is finished.", lambda: engine.run_finished)
        self._pools_ahead: frozenset[str] = frozenset()
        self._status_changed = asyncio.Event()
        self._earlier_deadline = asyncio.Event()
        self._next_expiry: float | None = None
        self._closing = False

    async def restore(self) -> None:
        stored = await read_episodes(self._ledger, kept=self.book.kept)
        self.book.restore(stored)
        self.clients.restore(self.book)
        self.committed_end = self._last_end = stored.last_end
        logger.info(
            "server.restored episodes=%d outcomes_to_deliver=%d", len(self.book), len(self.book.open_ends)
        )

    async def recall(self, uuids: Iterable[str]) -> None:
        """Load episodes from the ledger."""
        missing = [uuid for uuid in uuids if uuid not in self.book and _is_text(uuid)]
        for start in range(0, len(missing), PAGE):
            asked = missing[start : start + PAGE]
            await self._recall(f"uuid IN ({', '.join('?' * len(asked))})", *asked)

    async def empty(self, uuids: Sequence[str]) -> set[str]:
        await self.recall(uuids)
        return self.book.empty(uuids)

    async def recall_after(self, step: int, used: Collection[int]) -> None:
        """Load episodes planned by steps after `step`, those in `used`, and the rest of unfinished groups."""
        await self._recall("step > ?", step)
        begun = "SELECT group_id FROM {s}episodes WHERE consumed = 0 AND step > 0 AND episode_type = 'train'"
        await self._recall(f"group_id IN ({begun})")
        for start in range(0, len(used), PAGE):
            among = ", ".join(str(int(each)) for each in list(used)[start : start + PAGE])
            await self._recall(f"sequence IN ({among})")

    async def _recall(self, where: str, *parameters: Any) -> None:
        rest = f"WHERE consumed = 1 AND {where} ORDER BY sequence"
        found = await self._ledger.rows(EpisodeRow, rest, parameters)
        rows = [each for each in found if each.uuid not in self.book]
        for start in range(0, len(rows), PAGE):
            self.book.recall(await _with_attempts(self._ledger, rows[start : start + PAGE]))

    async def run(self) -> None:
        """Raises StoreError when a commit fails."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_leases())
            tasks.create_task(self._ledger.failed())

    @property
    def waiting_clients(self) -> int:
        return len(self._long_polls)

    @property
    def idle_clients(self) -> int:
        """Clients that hold no claim. Busy workers also wait, for more."""
        return sum(not self.book.claims_held(name) for name in self._polling)

    @contextmanager
    def _counted(self, client: str) -> Generator[None]:
        self._polling[client] += 1
        try:
            yield
        finally:
            self._polling[client] -= 1
            if not self._polling[client]:
                del self._polling[client]

    def close(self) -> None:
        self._closing = True
        self._long_polls.notify_all()
        self.run_end.close()

    def settle(self) -> None:
        changes = self.book.take_changes()
        changed = [*changes.added.values(), *changes.saved.values()]
        write_changes(self._ledger, changes)
        for closed in changes.closed:
            self._watch(closed)
            for forget in self._forget:
                forget(closed.episode.uuid, closed.attempt)
            if not closed.counts and not self._keeps_failed_calls:
                self._ledger.execute(
                    "DELETE FROM {s}calls WHERE episode = ? AND attempt = ?",
                    closed.episode.sequence,
                    closed.attempt,
                )
        if requeued := sum(closed.episode.state == "registered" for closed in changes.closed):
            self._metrics.count_requeues(requeued)
        self._wake_clients(changed)
        self._announce(changed)
        deadline = self.book.leases.next_deadline()
        if deadline is not None and (self._next_expiry is None or deadline < self._next_expiry):
            self._earlier_deadline.set()

    def _watch(self, closed: ClosedClaim) -> None:
        client = closed.episode.claimants[closed.attempt - 1]
        self.clients.closed(client)
        if closed.counts:
            self.clients.succeeded(client)
        elif closed.fault:
            for name in self.clients.failed(client, closed.fault):
                logger.warning("client.quarantined name=%r: %s", name, self.clients.quarantined()[name])

    def _wake_clients(self, changed: list[EpisodeRecord]) -> None:
        if self.engine.status == ROLLING:
            for episode in changed:
                if episode.state == "registered":
                    self._long_polls.notify(episode.pool, episode.episode_type)

    def _announce(self, changed: list[EpisodeRecord]) -> None:
        numbers = sorted(
            each.end_number
            for each in changed
            if each.end_number is not None and each.end_number > self._last_end and not each.consumed
        )
        if numbers:
            self._last_end = numbers[-1]
            self._ledger.after_commit(partial(self._ended, numbers))

    def _ended(self, numbers: list[int]) -> None:
        self.committed_end = numbers[-1]
        self.on_ended(numbers)

    async def commit(self) -> None:
        self.settle()
        await self._ledger.durable()

    def when_committed(self, callback: Callable[[], None]) -> None:
        self._ledger.after_commit(callback)

    async def claim(self, request: ClaimEpisodeRequest) -> list[Claim] | str:
        """Claim episodes, or return the `fail_cause` after `request.wait_s`.

        Raises QuotaError if the client waits too often, and UnauthorizedError 403 in quarantine.
        """
        self.clients.seen(request.client_uuid)
        until = self._clock() + request.wait_s
        wakeup: Wakeup | None = None
        while True:
            episodes = self.book.answered(request.client_uuid, request.claim_request_id)
            answered = episodes is not None
            pause = None if answered else self.clients.pause(request.client_uuid)
            if episodes is None:
                episodes = [] if pause else self._claim_now(request)
            if wakeup is not None and (answered or not episodes):
                self._pass_on(wakeup)
            if episodes:
                return await self._committed_claims(request, episodes)
            if pause and pause.is_refusal:
                raise UnauthorizedError(403, pause.reason)
            left_s = until - self._clock()
            in_vain = pause or self._answers_at_once or not self._free_claims(request)
            if answered or left_s <= 0 or in_vain:
                return self._why_nothing(request, answered, pause.reason if pause else "")
            try:
                with (
                    self.clients.waiting(request.client_uuid, "an episode"),
                    self._counted(request.client_uuid),
                ):
                    wakeup = await self._long_polls.wait(
                        request.pool, request.episode_type, left_s, _request_key(request)
                    )
            except TimeoutError:
                wakeup, until = None, self._clock()

    def withdraw(self, request: ClaimEpisodeRequest, claims: list[Claim]) -> None:
        """Take claims back, unless a request id lets the client ask again."""
        if request.claim_request_id:
            return
        failure = Failure(kind=CLIENT_GONE, message="the client hung up before the reply")
        for claim in claims:
            try:
                self.book.abort(claim.episode_uuid, claim.attempt, failure)
            except NotTheOwnerError as error:
                logger.info("claim.lost_before_reply reason=%s", error)
        self.settle()

    def stop_client(self, client: str) -> None:
        """Also requeues its episodes."""
        self.clients.stop(client)
        for name in self.book.clients_named(client) if client.endswith("/") else (client,):
            self.book.release_client(name, "an operator has stopped the client", kind=CLIENT_STOPPED)
        self.settle()

    async def _committed_claims(
        self, request: ClaimEpisodeRequest, episodes: list[EpisodeRecord]
    ) -> list[Claim]:
        claims = [self._snapshot(episode) for episode in episodes]
        try:
            await self._ledger.durable()
        except asyncio.CancelledError:
            self.withdraw(request, claims)
            raise
        return claims

    def _snapshot(self, episode: EpisodeRecord) -> Claim:
        self.book.leases.renew(episode)
        return Claim(
            episode_uuid=episode.uuid,
            attempt=episode.attempt,
            client_uuid=episode.client_uuid,
            episode_type=episode.episode_type,
            group_id=episode.group_id,
            payload=episode.payload,
            policy_version=episode.policy_version,
            lease_s=episode.lease_s,
            left_s=self.book.leases.left_s(episode),
        )

    @property
    def why_over(self) -> str:
        if not self.engine.run_finished:
            return ""
        return f"The run has failed: {self.engine.failure}" if self.engine.failure else RUN_FINISHED

    @property
    def _answers_at_once(self) -> bool:
        return self._closing or self.engine.run_finished

    def _pass_on(self, wakeup: Wakeup) -> None:
        if self.book.queues.claimable(wakeup.pool, wakeup.episode_type):
            self._long_polls.pass_on(wakeup)

    def _free_claims(self, request: ClaimEpisodeRequest) -> float:
        client = request.client_uuid
        free = self._totals.claims - self.book.claims_held(client)
        return max(0, min(free, self.clients.free_claims(client)))

    def _claim_now(self, request: ClaimEpisodeRequest) -> list[EpisodeRecord]:
        if self.engine.status != ROLLING or self._closing:
            return []
        kind = request.episode_type
        if self._trains_too_late or request.pool in self._pools_ahead:  # Only evaluations are useful then.
            if kind == "train":
                return []
            kind = "eval"
        number = min(request.max_episodes, self._free_claims(request))
        if self.clients.is_paced(request.client_uuid):
            number = min(number, 1)
        episodes = list[EpisodeRecord]()
        left = CLAIMED_BYTES
        while len(episodes) < number and left > 0 and (episode := self._claim_one(request, kind)) is not None:
            episodes.append(episode)
            left -= len(episode.payload)
            self._metrics.count_claim()
            self.clients.claimed(request.client_uuid)
        if episodes:
            self.settle()
            if key := _request_key(request):
                self._long_polls.answered(key)
        return episodes

    @property
    def max_groups_ahead(self) -> int:
        """Number of complete groups at which a client's pool is held back. 0: no batch known."""
        batch = self.engine.batch
        return 0 if batch is None else batch.needed

    @property
    def _trains_too_late(self) -> bool:
        usable = self.engine.usable_versions
        return usable is not None and self.engine.policy_version not in usable

    def _claim_one(self, request: ClaimEpisodeRequest, kind: ClaimType) -> EpisodeRecord | None:
        return self.book.claim(
            request.client_uuid,
            kind,
            request.allow_discard_timeout,
            pool=request.pool,
            policy_version=self.engine.policy_version,
            claim_request_id=request.claim_request_id,
        )

    def _why_nothing(self, request: ClaimEpisodeRequest, answered: bool, too_soon: str) -> str:
        if answered:
            return (
                f"{NO_EPISODES} The request {request.claim_request_id!r} was answered before, and its claims "
                "are over; a new request needs a new claim_request_id."
            )
        if self.engine.run_finished:
            self.run_end.knows(request.client_uuid)
            return self.why_over
        if too_soon:
            return f"{NO_EPISODES} {too_soon}"
        if self._closing:
            return f"{NO_EPISODES} The server is restarting."
        if self.engine.status in ("ENGINE.WEIGHT_SYNCING", "ENGINE.WEIGHT_EXPORTING"):
            return WEIGHT_SYNCING
        if self.engine.status != ROLLING:
            return f"{NO_EPISODES} The engine's status is {self.engine.status}."
        if self._trains_too_late and request.episode_type != "eval":
            return f"{WEIGHT_SYNCING}: by the time it trains, an episode begun now would be too old."
        if request.pool in self._pools_ahead and request.episode_type != "eval":
            return (
                f"{NO_EPISODES} The pool {request.pool!r} is {self.max_groups_ahead} groups or more ahead of "
                "the trainer."
            )
        if not self._free_claims(request):
            return (
                f"{NO_EPISODES} Client {request.client_uuid!r} holds {self._totals.claims} claims, the "
                "maximum."
            )
        return NO_EPISODES

    def register(self, new: NewEpisode, *, limited: bool = False) -> None:
        """Register all copies or none. `limited`: the pool's quota applies.

        Raises ValueError for an invalid episode, ConflictError for other content, and QuotaError.
        """
        check_episode(new)
        if limited:
            self._check_pool(new, sum(uuid not in self.book for uuid in new.uuids))
        self.book.register(
            new.episode_uuid,
            new.episode_type,
            new.group_id,
            new.payload,
            pool=new.pool,
            group_size=new.group_size,
            step=new.step,
            label=new.label,
            position=new.position,
            copies=new.copies,
        )

    def _check_pool(self, new: NewEpisode, number: int) -> None:
        quota = self._totals.pool_episodes
        if number and self.book.counts.unfinished(new.pool) + number > quota:
            raise QuotaError(
                f"the pool {new.pool!r} holds {quota} unfinished episodes at most, and has no room for "
                f"{number} more; register them when some are over"
            )
        if self.book.counts.payload_bytes(new.pool) + number * len(new.payload) > POOL_BYTES.limit:
            raise QuotaError(
                f"the payloads of the pool {new.pool!r} have {POOL_BYTES.limit} bytes at most; register more "
                "when some are over"
            )
        more, limit = number * (len(new.payload) + EPISODE_BYTES), self._totals.all_pools_bytes
        if self.book.counts.clients_bytes + more > limit:
            raise QuotaError(
                f"the memory of all pools of clients is {limit} bytes at most; register more when some of "
                "their episodes are over"
            )

    def sample_without_trainer(self, model: str) -> None:
        self.engine.without_trainer = ROLLING
        self.engine.model, self.engine.policy_version = model, FOREIGN_POLICY
        self.set_status(self.engine.without_trainer)

    @property
    def trains_clients(self) -> bool:
        return self.engine.client_samples

    def trainer_starts(self) -> None:
        self.engine.booting = True
        self.engine.run_finished, self.engine.failure = False, ""
        self.run_end.set(False)
        self.set_status("ENGINE.BOOTING")

    def trainer_gone(self, failure: str = "") -> None:
        self.engine.failure = self.engine.failure or failure
        self.set_status("ENGINE.BOOTING" if self.engine.booting else self.engine.without_trainer)

    def trainer_says(self, hello: Hello) -> None:
        engine = self.engine
        if engine.booting and hello.engine_status == "ENGINE.OFFLINE":
            return
        engine.booting = False
        self.clients.own_prefix = own_clients(hello.trainer_id)
        too_late, ahead = self._trains_too_late, self._pools_ahead
        engine.policy_version, engine.global_step = hello.policy_version, hello.global_step
        engine.model, engine.failure = hello.model, hello.failure
        engine.client_samples = hello.client_samples
        engine.usable_versions = None if hello.usable_versions is None else frozenset(hello.usable_versions)
        engine.batch = hello.batch
        limit = self.max_groups_ahead
        groups = {} if hello.batch is None else hello.batch.groups_ahead
        self._pools_ahead = frozenset(pool for pool, number in groups.items() if number >= limit)
        if (too_late and not self._trains_too_late) or ahead - self._pools_ahead:
            self._long_polls.notify_all()
        if hello.run_finished and not engine.run_finished:
            logger.info("run.finished step=%d", hello.global_step)
            self._long_polls.notify_all()
        engine.run_finished = hello.run_finished
        self.run_end.set(hello.run_finished)
        self.set_status(hello.engine_status)

    def set_status(self, status: EngineStatus) -> None:
        """Claims wait unless the status is ROLLING."""
        if status != self.engine.status:
            logger.info("engine.status from=%s to=%s", self.engine.status, status)
            self.engine.status = status
            self._status_changed.set()
            self._long_polls.notify_all()

    async def offline(self) -> None:
        while self.engine.status != "ENGINE.OFFLINE":
            self._status_changed.clear()
            await self._status_changed.wait()

    async def _expire_leases(self) -> None:
        while True:
            self._earlier_deadline.clear()
            self._next_expiry = self.book.leases.next_deadline()
            left_s = None if self._next_expiry is None else max(0.0, self._next_expiry - self._clock())
            try:
                async with asyncio.timeout(left_s):
                    await self._earlier_deadline.wait()
            except TimeoutError:
                self.expire()

    def expire(self) -> None:
        expired = self.book.expire()
        for episode in expired:
            with about(episode=episode.uuid, attempt=episode.attempt, client=episode.client_uuid):
                logger.warning("claim.expired episode_uuid=%s attempt=%d", episode.uuid, episode.attempt)
        self._metrics.count_expired_claims(len(expired))
        self.settle()


# A database lease can be renewed between pages.
PAGE = 5000


_COUNTED = """
SELECT pool, episode_type, state, count(*) FROM {s}episodes WHERE consumed = 1 AND end_number <= ?
    AND NOT (state = 'failed' AND failure <> 'cancelled' AND dropped = 0) GROUP BY pool, episode_type, state
"""

_PRESENT = """
WHERE sequence > ? AND (consumed = 0 OR end_number > ?
    OR (state = 'failed' AND failure <> 'cancelled' AND dropped = 0)) ORDER BY sequence LIMIT ?
"""


async def read_episodes(ledger: Ledger, *, kept: int = KEPT) -> StoredEpisodes:
    """Consumed episodes lack payload and result."""
    ((last_sequence, last_end),) = await ledger.read(
        "SELECT (SELECT coalesce(max(sequence), 0) FROM {s}episodes), "
        "(SELECT coalesce(max(end_number), 0) FROM {s}episodes)"
    )
    until = last_end - kept
    counted = await ledger.read(_COUNTED, (until,)) if until > 0 else []
    past: PastCounts = {(pool, kind, state): number for pool, kind, state, number in counted}
    found = list[EpisodeRecord]()
    while True:
        after = found[-1].sequence if found else 0
        page = await ledger.rows(EpisodeRow, _PRESENT, (after, until, PAGE))
        if page:
            found += await _with_attempts(ledger, page)
        if len(page) < PAGE:
            return StoredEpisodes(found, past, last_sequence, last_end)


async def _with_attempts(ledger: Ledger, page: list[EpisodeRow]) -> list[EpisodeRecord]:
    among = f"({', '.join(str(row.sequence) for row in page)})"
    attempts: dict[int, list[AttemptRow]] = {}
    # Attempt 0 is the last failure: it ended an unclaimed episode.
    last = "CASE WHEN attempt = 0 THEN 1 ELSE 0 END"
    in_order = f"WHERE episode IN {among} ORDER BY episode, {last}, attempt"
    for attempt in await ledger.rows(AttemptRow, in_order):
        attempts.setdefault(attempt.episode, []).append(attempt)
    open_ones = f"WHERE e.sequence IN {among} AND e.consumed = 0"
    payloads = dict[bytes, bytes](
        await ledger.read(
            "SELECT DISTINCT s.digest, payload FROM {s}samples AS s "
            f"JOIN {{s}}episodes AS e ON s.digest = e.sample {open_ones}",
        )
    )
    results = dict[int, bytes](
        await ledger.read(
            "SELECT episode, result FROM {s}results AS r "
            f"JOIN {{s}}episodes AS e ON r.episode = e.sequence {open_ones}",
        )
    )
    return [
        restored(
            row,
            attempts.get(row.sequence, ()),
            payload=b"" if row.consumed else payloads[row.sample],
            result=b"" if row.consumed else results.get(row.sequence, b""),
        )
        for row in page
    ]


def _is_text(text: str) -> bool:
    """Lone surrogates fit into JSON, but not databases."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _request_key(request: ClaimEpisodeRequest) -> RequestKey | None:
    return (request.client_uuid, request.claim_request_id) if request.claim_request_id else None
