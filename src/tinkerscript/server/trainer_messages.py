"""`TrainerMessageHandler`: what the server does with the trainer's messages.

Invariant: a message that cannot be carried out is logged, counted or answered; it never stops the link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from tinkerscript.errors import ConflictError, UnknownEpisodeError
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.outcome_delivery import OutcomeDelivery
from tinkerscript.server.store.episode_store import EpisodeStore
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.messages import (
    Acknowledge,
    Cancel,
    Cancelled,
    Hello,
    NotRegistered,
    Outcomes,
    OutcomesRequest,
    Register,
    Registered,
    ReleaseClient,
    Sampled,
    SampleFailed,
    SampleProgress,
)
from tinkerscript.trainer_link.remote_sampling import LinkSampler
from tinkerscript.trainer_link.server_end import LinkEvent, ServerLink, TrainerEvent

logger = logging.getLogger(__name__)


class TrainerMessageHandler:
    """Serves the link: `run` owns its tasks, and the one that delivers outcomes."""

    def __init__(
        self,
        *,
        interchange: Interchange,
        store: EpisodeStore,
        link: ServerLink,
        sampler: LinkSampler,
        delivery: OutcomeDelivery,
        metrics: ServerMetrics,
        times: LinkTimes,
    ) -> None:
        self._interchange = interchange
        self._store = store
        self._link = link
        self._sampler = sampler
        self._delivery = delivery
        self._metrics = metrics
        self._times = times
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Serve the link until cancelled. Use once."""
        async with self._tasks as tasks:
            tasks.create_task(self._link.run(self.handle))
            tasks.create_task(self._delivery.run())
            tasks.create_task(self._repeat())

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._times.resend_s)
            self._delivery.repeat(after_s=self._times.resend_s)
            self._sampler.resend()

    def handle(self, event: LinkEvent) -> None:
        """Handle one event of the link."""
        match event:
            case Hello():
                self._hello(event)
            case TrainerEvent.CONNECTED:
                self._delivery.repeat()
                self._sampler.trainer_connected()
            case TrainerEvent.SILENT:
                self._interchange.set_status(self._interchange.engine.without_trainer)
            case TrainerEvent.LOST:
                self._sampler.engine_unavailable()
            case Register():
                self._register(event)
            case Acknowledge():
                self._each(event.episode_uuids, "acknowledge", self._acknowledge)
            case Cancel():
                self._each(
                    event.episode_uuids,
                    "cancel",
                    lambda uuid: self._interchange.book.cancel(uuid, event.reason),
                )
                done = Cancelled(episode_uuids=event.episode_uuids)
                self._interchange.when_committed(lambda: self._link.send(done))
            case ReleaseClient():
                released = self._interchange.book.release_client(event.client_uuid, event.reason)
                self._interchange.settle()
                logger.info("client.released client_uuid=%s claims=%d", event.client_uuid, len(released))
            case OutcomesRequest():
                self._tasks.create_task(self._send_outcomes(event))
            case Sampled() | SampleProgress() | SampleFailed():
                self._sampler.message(event)

    def _hello(self, hello: Hello) -> None:
        engine = self._interchange.engine
        engine.policy_version = hello.policy_version
        engine.global_step = hello.global_step
        engine.model = hello.model
        self._interchange.set_status(hello.engine_status)
        self._interchange.when_committed(partial(self._link.welcome, hello.number))

    def _register(self, message: Register) -> None:
        registered = list[str]()
        for new in message.episodes:
            try:
                self._interchange.register(new)
            except (ValueError, ConflictError) as error:
                logger.warning("episode.refused episode_uuid=%s error=%s", new.episode_uuid, error)
                self._link.send(NotRegistered(episode_uuid=new.episode_uuid, reason=str(error)))
            else:
                registered.append(new.episode_uuid)
        self._interchange.settle()
        done = Registered(episode_uuids=registered)
        self._interchange.when_committed(lambda: self._link.send(done))

    def _acknowledge(self, uuid: str) -> None:
        if not self._interchange.book.acknowledge(uuid):
            logger.warning("episode.early_acknowledgement episode_uuid=%s", uuid)

    def _each(self, uuids: list[str], action: str, change: Callable[[str], object]) -> None:
        """Change each episode that this server knows."""
        for uuid in uuids:
            try:
                change(uuid)
            except UnknownEpisodeError as error:
                logger.warning("link.drop reason=unknown_episode action=%s detail=%s", action, error)
                self._metrics.count_link_drop("unknown_episode")
        self._interchange.settle()

    async def _send_outcomes(self, request: OutcomesRequest) -> None:
        await self._store.durable()
        outcomes = await self._store.outcomes(request.episode_uuids)
        self._link.send(Outcomes(request_id=request.request_id, outcomes=outcomes))
