"""The interchange: every change of an episode, made durable, then told to whoever waits for it.

Invariant: memory, file and the world see a change in this order and no other: the book changes, the store
commits, and only then the change is answered, or the episode's outcome offered to the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tinkerscript.errors import NotTheOwnerError, QuotaError
from tinkerscript.protocol import NO_EPISODES, WEIGHT_SYNCING, ClaimEpisodeRequest, EngineStatus, Failure
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.indexes import RequestKey
from tinkerscript.server.episodes.record import Claim, EpisodeRecord
from tinkerscript.server.long_polls import LongPollQueue, Wake
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.outcome_delivery import OutcomeDelivery
from tinkerscript.server.store.base import EpisodeStore
from tinkerscript.trainer_link.messages import NewEpisode, check_episode
from tinkerscript.waiting import Signal

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineState:
    """What the trainer said last about its engine. Episodes are handed out while it is ROLLING."""

    status: EngineStatus = "ENGINE.OFFLINE"
    without_trainer: EngineStatus = "ENGINE.OFFLINE"
    """The status while no trainer is connected: ROLLING where another server samples."""

    policy_version: int = 0
    global_step: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client may hold at once."""

    max_claims_per_client: int = 4096
    max_pool_episodes: int = 20_000
    """Episodes in its own pool that are not over and acknowledged."""


class Interchange:
    """What the routes and the trainer's desk call. Mutations are synchronous; `durable` awaits the commit."""

    def __init__(
        self,
        *,
        book: EpisodeBook,
        store: EpisodeStore,
        courier: OutcomeDelivery,
        metrics: ServerMetrics,
        forget: Callable[[str, int], None],
        clock: Callable[[], float],
        limits: ClientLimits | None = None,
    ) -> None:
        """Restores the book from the store. `forget(uuid, attempt)` is told of every claim that is over."""
        self.engine = EngineState()
        self._book = book
        self._store = store
        self._courier = courier
        self._metrics = metrics
        self._forget = forget
        self._clock = clock
        self._limits = limits or ClientLimits()
        self._line = LongPollQueue()
        metrics.watch_waiting_clients(self._line)
        self._earlier_deadline = Signal()
        self._alarm_at: float | None = None
        self._closing = False
        book.restore(store.load())
        courier.add(e.uuid for e in book if e.state in ("ended", "failed"))
        logger.info("server.restored episodes=%d outcomes_to_deliver=%d", len(book), len(courier))

    async def run(self) -> None:
        """Expire leases until cancelled. Raises StoreError as soon as a commit fails."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire_leases())
            tasks.create_task(self._store.failed())

    @property
    def waiting_clients(self) -> int:
        """Clients in long polls."""
        return len(self._line)

    def close(self) -> None:
        """Answer all who wait: the server shuts down."""
        self._closing = True
        self._line.notify_all()

    async def durable(self) -> None:
        """Return once all changes so far are committed. Raises StoreError."""
        await self._store.durable()

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Run `callback` once all changes so far are committed."""
        self._store.after_commit(callback)

    # What clients do

    async def claim(self, request: ClaimEpisodeRequest) -> list[Claim] | str:
        """The claims, or the `fail_cause` when nothing could be claimed within `request.wait_s`.

        A request whose `claim_request_id` was answered with claims gets the same again.
        """
        until = self._clock() + request.wait_s
        wake: Wake | None = None
        while True:
            episodes = self._book.answered(request.client_uuid, request.claim_request_id)
            answered = episodes is not None
            if episodes is None:
                episodes = self._claim_now(request)
            if wake is not None and (answered or not episodes):
                self._pass_on(wake)
            if episodes:
                return await self._durable_claims(request, episodes)
            left_s = until - self._clock()
            if answered or left_s <= 0 or self._closing or not self._room(request):
                return self._why_nothing(request, answered)
            try:
                wake = await self._line.wait(
                    request.pool, request.episode_type, left_s, _request_key(request)
                )
            except TimeoutError:
                wake, until = None, self._clock()

    async def _durable_claims(
        self, request: ClaimEpisodeRequest, episodes: list[EpisodeRecord]
    ) -> list[Claim]:
        claims = [self._claim_of(episode) for episode in episodes]
        try:
            await self._store.durable()
        except asyncio.CancelledError:
            self.hung_up(request, claims)
            raise
        return claims

    def _claim_of(self, episode: EpisodeRecord) -> Claim:
        self._book.renew(episode)
        return Claim(
            episode_uuid=episode.uuid,
            attempt=episode.attempt,
            client_uuid=episode.client_uuid,
            episode_type=episode.episode_type,
            group_id=episode.group_id,
            payload=episode.payload,
            policy_version=episode.policy_version,
            lease_s=episode.lease_s,
            left_s=self._book.left_s(episode),
        )

    def hung_up(self, request: ClaimEpisodeRequest, claims: list[Claim]) -> None:
        """The client is gone before it learned of its claims.

        One that sent a request id keeps them, since it will ask again; from another they are taken back.
        """
        if request.claim_request_id:
            return
        failure = Failure(kind="client_gone", message="the client hung up before the reply")
        for claim in claims:
            try:
                self.abort(claim.episode_uuid, claim.client_uuid, claim.attempt, failure)
            except NotTheOwnerError as error:
                logger.info("claim.lost_before_reply reason=%s", error)

    def _pass_on(self, wake: Wake) -> None:
        if self._book.claimable(wake.pool, wake.episode_type):
            self._line.pass_on(wake)

    def _room(self, request: ClaimEpisodeRequest) -> int:
        """How many claims more the client may hold."""
        return max(0, self._limits.max_claims_per_client - self._book.claims_held(request.client_uuid))

    def _claim_now(self, request: ClaimEpisodeRequest) -> list[EpisodeRecord]:
        if self.engine.status != "ENGINE.ROLLING" or self._closing:
            return []
        number = min(request.max_episodes, self._room(request))
        episodes = list[EpisodeRecord]()
        while len(episodes) < number and (episode := self._claim_one(request)) is not None:
            episodes.append(episode)
            self._metrics.count_claim()
        if episodes:
            self._settle()
            if key := _request_key(request):
                self._line.answered(key)
        return episodes

    def _claim_one(self, request: ClaimEpisodeRequest) -> EpisodeRecord | None:
        return self._book.claim(
            request.client_uuid,
            request.episode_type,
            request.allow_discard_timeout,
            pool=request.pool,
            policy_version=self.engine.policy_version,
            may_repeat=request.sends_attempt,
            claim_request_id=request.claim_request_id,
        )

    def _why_nothing(self, request: ClaimEpisodeRequest, answered: bool) -> str:
        if answered:
            return (
                f"{NO_EPISODES} The request {request.claim_request_id!r} was answered before, and its claims "
                "are over; a new request needs a new claim_request_id."
            )
        if self._closing:
            return f"{NO_EPISODES} The server is restarting."
        if self.engine.status in ("ENGINE.WEIGHT_SYNCING", "ENGINE.WEIGHT_EXPORTING"):
            return WEIGHT_SYNCING
        if self.engine.status != "ENGINE.ROLLING":
            return f"{NO_EPISODES} The engine's status is {self.engine.status}."
        if not self._room(request):
            limit = self._limits.max_claims_per_client
            return (
                f"{NO_EPISODES} Client {request.client_uuid!r} holds {limit} claims, all that it may "
                "(interchange_server.max_claims_per_client)."
            )
        return NO_EPISODES

    def end(self, uuid: str, client_uuid: str, attempt: int | None, *, reward: float, result: bytes) -> None:
        """Raises what `EpisodeBook.end` raises."""
        self._book.end(uuid, client_uuid, attempt, reward=reward, result=result)
        self._settle()

    def abort(self, uuid: str, client_uuid: str, attempt: int | None, failure: Failure) -> None:
        """Raises what `EpisodeBook.abort` raises."""
        self._book.abort(uuid, client_uuid, attempt, failure)
        self._settle()

    def held(self, uuid: str, client_uuid: str, attempt: int | None) -> EpisodeRecord:
        """The episode, if this claim holds its lease; renews it. Raises what `EpisodeBook.held` raises."""
        return self._book.held(uuid, client_uuid, attempt)

    # What the trainer does

    def register(self, new: NewEpisode) -> None:
        """Raises ValueError for what cannot be an episode, ConflictError for other content under its uuid."""
        check_episode(new)
        self._book.register(
            new.episode_uuid,
            new.episode_type,
            new.group_id,
            new.payload,
            pool=new.pool,
            group_size=new.group_size,
        )
        self._settle()

    def register_for_client(self, new: NewEpisode) -> None:
        """`register`, as far as the quota of the client's pool goes. Raises QuotaError beyond it."""
        quota = self._limits.max_pool_episodes
        if new.episode_uuid not in self._book and self._book.census.unfinished(new.pool) >= quota:
            raise QuotaError(
                f"the pool {new.pool!r} holds {quota} unfinished episodes, all that it may "
                "(interchange_server.max_pool_episodes); register more when some are over"
            )
        self.register(new)

    def acknowledge(self, uuid: str) -> None:
        """The outcome is in the trainer's journal. Raises UnknownEpisodeError."""
        if self._book.acknowledge(uuid):
            self._courier.acknowledged([uuid])
        else:
            logger.warning("episode.early_acknowledgement episode_uuid=%s", uuid)
        self._settle()

    def cancel(self, uuid: str, reason: str) -> None:
        """The episode is not needed any more. Raises UnknownEpisodeError."""
        self._book.cancel(uuid, reason)
        self._settle()

    def release_client(self, client_uuid: str, reason: str) -> int:
        """The client is dead; returns how many claims it lost."""
        released = self._book.release_client(client_uuid, reason)
        self._settle()
        return len(released)

    # What an operator does

    def retry(self, uuid: str) -> None:
        """Try a failed episode again. Raises what `DeadLetters.retry` raises."""
        self._book.dead_letters.retry(uuid)
        self._courier.withdraw(uuid)
        self._settle()

    def drop(self, uuid: str) -> None:
        """Take a failed episode off the list. Raises what `DeadLetters.drop` raises."""
        self._book.dead_letters.drop(uuid)
        self._courier.acknowledged([uuid])
        self._settle()

    def sample_without_trainer(self, model: str, policy_version: int) -> None:
        """Another server samples: episodes are handed out whether a trainer is there or not."""
        self.engine.without_trainer = "ENGINE.ROLLING"
        self.engine.model, self.engine.policy_version = model, policy_version
        self.set_status(self.engine.without_trainer)

    def set_status(self, status: EngineStatus) -> None:
        """Claims wait unless the engine is ROLLING."""
        if status != self.engine.status:
            logger.info("engine.status from=%s to=%s", self.engine.status, status)
            self.engine.status = status
            self._line.notify_all()

    # The order of things

    def _settle(self) -> None:
        """Store what the book changed, and tell those who wait for it."""
        changes = self._book.take_changes()
        for episode in changes.added.values():
            self._store.add(episode)
        for episode in changes.saved.values():
            self._store.save(episode)
        for closed in changes.closed:
            self._forget(closed.episode.uuid, closed.attempt)
            if not closed.counts:
                self._store.drop_calls(closed.episode, closed.attempt)
        requeued = [closed.episode for closed in changes.closed if closed.episode.state == "registered"]
        self._metrics.count_requeues(len(requeued))
        changed = (*changes.added.values(), *changes.saved.values())
        self._wake_for([episode for episode in changed if episode.state == "registered"])
        over = [e.uuid for e in changes.saved.values() if e.state in ("ended", "failed")]
        if over:
            self._store.after_commit(partial(self._courier.add, over))
        self._set_alarm()

    def _wake_for(self, claimable: list[EpisodeRecord]) -> None:
        if self.engine.status == "ENGINE.ROLLING":
            for episode in claimable:
                self._line.notify(episode.pool, episode.episode_type)

    def _set_alarm(self) -> None:
        deadline = self._book.next_deadline()
        if deadline is not None and (self._alarm_at is None or deadline < self._alarm_at):
            self._earlier_deadline.fire()

    async def _expire_leases(self) -> None:
        """Wait for the earliest deadline, or for an earlier one."""
        while True:
            self._alarm_at = self._book.next_deadline()
            left_s = None if self._alarm_at is None else max(0.0, self._alarm_at - self._clock())
            try:
                async with asyncio.timeout(left_s):
                    await self._earlier_deadline.wait()
            except TimeoutError:
                self.expire()

    def expire(self) -> None:
        """Lapse the claims that are due; `run` does so at every deadline."""
        expired = self._book.expire()
        for episode in expired:
            logger.warning("claim.lapsed episode_uuid=%s attempt=%d", episode.uuid, episode.attempt)
        self._metrics.count_lapses(len(expired))
        self._settle()


def _request_key(request: ClaimEpisodeRequest) -> RequestKey | None:
    """None for a request without an id."""
    return (request.client_uuid, request.claim_request_id) if request.claim_request_id else None
