"""`TrainerMessageHandler`: what the server does with the trainer's messages.

Invariant: what cannot be done is logged, counted or answered, and never stops the link.
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
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.messages import (
    Acknowledge,
    Cancel,
    Cancelled,
    Hello,
    NotRegistered,
    Register,
    Registered,
    ReleaseClient,
    Sampled,
    SampleFailed,
    SampleProgress,
)
from tinkerscript.trainer_link.remote_sampling import LinkSampler
from tinkerscript.trainer_link.server_end import FromTrainer, ServerLink

logger = logging.getLogger(__name__)


class TrainerMessageHandler:
    """The `LinkHandler` of the server."""

    def __init__(
        self,
        *,
        interchange: Interchange,
        link: ServerLink,
        sampler: LinkSampler,
        courier: OutcomeDelivery,
        metrics: ServerMetrics,
        times: LinkTimes,
    ) -> None:
        self._interchange = interchange
        self._link = link
        self._sampler = sampler
        self._courier = courier
        self._metrics = metrics
        self._times = times

    async def run(self) -> None:
        """Serve the link until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.run(self))
            tasks.create_task(self._repeat())

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._times.resend_s)
            self._courier.repeat(after_s=self._times.resend_s)
            self._sampler.resend()

    def trainer_connected(self) -> None:
        self._courier.trainer_connected()
        self._sampler.trainer_connected()

    def trainer_gone(self) -> None:
        self._interchange.set_status(self._interchange.engine.without_trainer)

    def trainer_lost(self) -> None:
        self._sampler.engine_unavailable()

    def when_durable(self, callback: Callable[[], None]) -> None:
        self._interchange.when_durable(callback)

    def hello(self, hello: Hello) -> None:
        engine = self._interchange.engine
        engine.policy_version = hello.policy_version
        engine.global_step = hello.global_step
        engine.model = hello.model
        self._interchange.set_status(hello.engine_status)

    def message(self, message: FromTrainer) -> None:
        match message:
            case Register():
                self._register(message)
            case Acknowledge():
                for uuid in message.episode_uuids:
                    self._try("acknowledge", partial(self._interchange.acknowledge, uuid))
            case Cancel():
                for uuid in message.episode_uuids:
                    self._try("cancel", partial(self._interchange.cancel, uuid, message.reason))
                done = Cancelled(episode_uuids=message.episode_uuids)
                self._interchange.when_durable(lambda: self._link.send(done))
            case ReleaseClient():
                claims = self._interchange.release_client(message.client_uuid, message.reason)
                logger.info("client.released client_uuid=%s claims=%d", message.client_uuid, claims)
            case Sampled() | SampleProgress() | SampleFailed():
                self._sampler.message(message)

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
        self._interchange.when_durable(lambda: self._link.send(Registered(episode_uuids=registered)))

    def _try(self, action: str, mutate: Callable[[], None]) -> None:
        try:
            mutate()
        except UnknownEpisodeError as error:
            logger.warning("link.drop reason=unknown_episode action=%s detail=%s", action, error)
            self._metrics.count_link_drop("unknown_episode")
