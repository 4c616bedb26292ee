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

from tinkerscript.protocol import NO_EPISODES, WEIGHT_SYNCING, ClaimEpisodeRequest, EngineStatus, Failure
from tinkerscript.server.episode import Episode
from tinkerscript.server.episodes import EpisodeBook
from tinkerscript.server.messages import NewEpisode, check_episode
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.outcomes import Courier
from tinkerscript.server.store import EpisodeStore
from tinkerscript.server.waiting import Signal, WaitingLine, Wake

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineState:
    """What the trainer said last about its engine. Episodes are handed out while it is ROLLING."""

    status: EngineStatus = "ENGINE.OFFLINE"
    policy_version: int = 0
    global_step: int = 0
    model: str = ""


class Interchange:
    """What the routes and the trainer's desk call. Mutations are synchronous; `durable` awaits the commit."""

    def __init__(
        self,
        *,
        book: EpisodeBook,
        store: EpisodeStore,
        courier: Courier,
        metrics: ServerMetrics,
        forget: Callable[[str, int], None],
        clock: Callable[[], float],
    ) -> None:
        """Restores the book from the store. `forget(uuid, attempt)` is told of every claim that is over."""
        self.engine = EngineState()
        self._book = book
        self._store = store
        self._courier = courier
        self._metrics = metrics
        self._forget = forget
        self._clock = clock
        self._line = WaitingLine()
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

    async def claim(self, request: ClaimEpisodeRequest) -> list[Episode] | str:
        """The claimed episodes, or the `fail_cause` when none came within `request.wait_s`."""
        until = self._clock() + request.wait_s
        wake: Wake | None = None
        while True:
            episodes = self._claim_now(request)
            if episodes:
                return await self._durable_claims(episodes)
            if wake is not None and self._book.claimable(wake.episode_type):
                self._line.pass_on(wake)
            left_s = until - self._clock()
            if left_s <= 0 or self._closing:
                return self._why_nothing()
            try:
                wake = await self._line.wait(request.episode_type, left_s)
            except TimeoutError:
                wake, until = None, self._clock()

    async def _durable_claims(self, episodes: list[Episode]) -> list[Episode]:
        attempts = [episode.attempt for episode in episodes]
        try:
            await self._store.durable()
        except asyncio.CancelledError:
            for episode, attempt in zip(episodes, attempts, strict=True):
                self.hand_back(episode.uuid, episode.client_uuid, attempt)
            raise
        return episodes

    def hand_back(self, uuid: str, client_uuid: str, attempt: int) -> None:
        """The client hung up before it learned of its claim. Raises NotTheOwnerError if the claim is lost."""
        failure = Failure(kind="client_gone", message="the client hung up before the reply")
        self.abort(uuid, client_uuid, attempt, failure)

    def _claim_now(self, request: ClaimEpisodeRequest) -> list[Episode]:
        if self.engine.status != "ENGINE.ROLLING" or self._closing:
            return []
        episodes = list[Episode]()
        while len(episodes) < request.max_episodes and (episode := self._claim_one(request)) is not None:
            episodes.append(episode)
            self._metrics.count_claim()
        if episodes:
            self._settle()
        return episodes

    def _claim_one(self, request: ClaimEpisodeRequest) -> Episode | None:
        return self._book.claim(
            request.client_uuid,
            request.episode_type,
            request.allow_discard_timeout,
            policy_version=self.engine.policy_version,
            may_repeat=request.sends_attempt,
        )

    def _why_nothing(self) -> str:
        if self._closing:
            return f"{NO_EPISODES} The server is restarting."
        if self.engine.status in ("ENGINE.WEIGHT_SYNCING", "ENGINE.WEIGHT_EXPORTING"):
            return WEIGHT_SYNCING
        if self.engine.status != "ENGINE.ROLLING":
            return f"{NO_EPISODES} The engine's status is {self.engine.status}."
        return NO_EPISODES

    def end(self, uuid: str, client_uuid: str, attempt: int | None, *, reward: float, result: bytes) -> None:
        """Raises what `EpisodeBook.end` raises."""
        self._book.end(uuid, client_uuid, attempt, reward=reward, result=result)
        self._settle()

    def abort(self, uuid: str, client_uuid: str, attempt: int | None, failure: Failure) -> None:
        """Raises what `EpisodeBook.abort` raises."""
        self._book.abort(uuid, client_uuid, attempt, failure)
        self._settle()

    def held(self, uuid: str, client_uuid: str, attempt: int | None) -> Episode:
        """The episode, if this claim holds its lease; renews it. Raises what `EpisodeBook.held` raises."""
        return self._book.held(uuid, client_uuid, attempt)

    # What the trainer does

    def register(self, new: NewEpisode) -> None:
        """Raises ValueError for what cannot be an episode, ConflictError for other content under its uuid."""
        check_episode(new)
        self._book.register(new.episode_uuid, new.episode_type, new.group_id, new.payload)
        self._settle()

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
        self._wake_for([*changes.added.values(), *requeued])
        over = [e.uuid for e in changes.saved.values() if e.state in ("ended", "failed")]
        if over:
            self._store.after_commit(partial(self._courier.add, over))
        self._set_alarm()

    def _wake_for(self, claimable: list[Episode]) -> None:
        if self.engine.status == "ENGINE.ROLLING":
            for episode in claimable:
                self._line.notify(episode.episode_type)

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
                self._expire()

    def _expire(self) -> None:
        expired = self._book.expire()
        for episode in expired:
            logger.warning("claim.lapsed episode_uuid=%s attempt=%d", episode.uuid, episode.attempt)
        self._metrics.count_lapses(len(expired))
        self._settle()
