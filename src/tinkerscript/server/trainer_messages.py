"""What the server does for the trainer: `TrainerMessageHandler` carries out its messages, `OutcomeDelivery`
sends it the outcomes of episodes.

Invariant: a message that cannot be carried out is logged, counted or answered; it never stops the link.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import msgspec

from tinkerscript.errors import ConflictError, InterchangeError, StoreError, UnknownEpisodeError
from tinkerscript.logs import about
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.store.episode_store import EpisodeStore
from tinkerscript.trainer_link.framing import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, LinkTimes
from tinkerscript.trainer_link.messages import (
    Acknowledge,
    Cancel,
    Cancelled,
    EpisodeAccepted,
    EpisodeFailed,
    Hello,
    Metrics,
    NotRegistered,
    Outcome,
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

MAX_TRANSCRIPT_BYTES = 64 * 2**20
"""Of transcripts on their way to the trainer, beyond which outcomes go without theirs."""

MAX_FAILED_BYTES = 16 * 2**20
"""Of an episode's calls, beyond which those of its earliest attempts are not sent."""

AT_ONCE = 16
"""Outcomes whose calls are read from the store together."""

MAX_ON_THE_WAY = MAX_FRAME_BYTES
"""Bytes of outcomes that were sent and not acknowledged, beyond which the next ones wait."""

OVERHEAD = 1024
"""Bytes of a message around each call, and around the rest, at most."""


class TrainerMessageHandler:
    """Serves the link: `run` owns its tasks, and the one that delivers outcomes."""

    def __init__(
        self,
        *,
        interchange: Interchange,
        store: EpisodeStore,
        link: ServerLink,
        sampler: LinkSampler,
        metrics: ServerMetrics,
        times: LinkTimes,
    ) -> None:
        self._interchange = interchange
        self._store = store
        self._link = link
        self._sampler = sampler
        self._delivery = OutcomeDelivery(interchange, store, link)
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
            self._interchange.outcomes.requeue(after_s=self._times.resend_s)
            self._sampler.resend()

    def handle(self, event: LinkEvent) -> None:
        """Handle one event of the link."""
        try:
            self._handle(event)
        except StoreError:  # Memory is ahead of the store: the server ends.
            raise
        except Exception:
            logger.exception("link.drop reason=failed message=%s", type(event).__name__)
            self._metrics.count_link_drop("failed")

    def _handle(self, event: LinkEvent) -> None:
        match event:
            case Hello():
                self._hello(event)
            case TrainerEvent.CONNECTED:
                self._interchange.outcomes.requeue()
                self._sampler.trainer_connected()
            case TrainerEvent.SILENT:
                self._interchange.trainer_gone()
                self._metrics.forget_trainer()
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
            case Metrics():
                if not self._metrics.add_trainers(event.text):
                    self._metrics.count_link_drop("metrics")
            case Sampled() | SampleProgress() | SampleFailed():
                self._sampler.message(event)

    def _hello(self, hello: Hello) -> None:
        self._interchange.trainer_says(hello)
        accepted = sum(counts.accepted for counts in self._interchange.book.counts.by_type().values())
        quarantined = self._interchange.clients.quarantined()
        demand = self._interchange.demand()
        self._interchange.when_committed(
            partial(self._link.welcome, hello.number, accepted, quarantined, demand)
        )

    def _register(self, message: Register) -> None:
        registered = list[str]()
        for new in message.episodes:
            try:
                self._interchange.register(new)
            except (ValueError, ConflictError) as error:
                with about(episode=new.episode_uuid):
                    logger.warning("episode.refused episode_uuid=%s error=%s", new.episode_uuid, error)
                self._link.send(NotRegistered(episode_uuid=new.episode_uuid, reason=str(error)))
            else:
                registered.append(new.episode_uuid)
        self._interchange.settle()
        done = Registered(episode_uuids=registered)
        self._interchange.when_committed(lambda: self._link.send(done))

    def _acknowledge(self, uuid: str) -> None:
        if not self._interchange.book.acknowledge(uuid):
            with about(episode=uuid):
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


class OutcomeDelivery:
    """Sends the committed outcomes to the trainer, with their calls from the store.

    Invariants: a committed outcome is sent again and again until it is acknowledged. One that no message can
    carry fails its episode, with the reason: it must not keep the others from the trainer.
    """

    def __init__(self, interchange: Interchange, store: EpisodeStore, link: ServerLink) -> None:
        self._interchange = interchange
        self._book = interchange.book
        self._outcomes = interchange.outcomes
        self._store = store
        self._link = link
        self._on_the_way: dict[str, int] = {}
        """Episode uuid -> bytes of transcripts that were sent, and not acknowledged when that was looked at
        last."""

        self._sent: dict[str, int] = {}
        """Episode uuid -> bytes of an outcome that was sent, and not acknowledged when that was looked at
        last."""

    async def run(self) -> None:
        """Send what the window has room for, until cancelled. Raises StoreError."""
        while True:
            await self._outcomes.changed.wait()
            self._outcomes.changed.clear()
            while self._link.connected and (uuids := self._outcomes.take(self._room())):
                await self._send_each(uuids)

    async def _send_each(self, uuids: list[str]) -> None:
        """Send outcomes; one that cannot be read or written fails alone."""
        try:
            await self._send(uuids)
        except StoreError:
            raise
        except Exception as error:
            for uuid in uuids if len(uuids) > 1 else ():
                await self._send_each([uuid])
            if len(uuids) == 1:
                logger.exception("outcome.failed episode_uuid=%s", uuids[0])
                self._give_up(self._book.get(uuids[0]), f"{type(error).__name__}: {error}")

    def _room(self) -> int:
        """How many outcomes may be read and sent now."""
        self._sent = {uuid: size for uuid, size in self._sent.items() if self._outcomes.is_sent(uuid)}
        return AT_ONCE if sum(self._sent.values()) < MAX_ON_THE_WAY else 0

    async def _send(self, uuids: list[str]) -> None:
        episodes = [self._book.get(uuid) for uuid in uuids]
        first_offers = [each for each in episodes if each.state == "failed" and not each.offered]
        for episode in first_offers:
            self._store.save(self._book.offer_failure(episode.uuid))
        if first_offers:
            await self._store.durable()
        claims = [(episode, attempt) for episode in episodes for attempt in _attempts(episode)]
        found = await self._store.calls(claims) if claims else []
        calls: dict[str, dict[int, list[Call]]] = {episode.uuid: {} for episode in episodes}
        for (episode, attempt), each in zip(claims, found, strict=True):
            calls[episode.uuid][attempt] = each
        transcribed = await self._store.transcribed(episodes) if episodes else set[str]()
        for episode in episodes:
            if not episode.acknowledged:
                transcripts = await self._transcripts(episode) if episode.uuid in transcribed else {}
                self._send_one(episode, outcome_of(episode, calls[episode.uuid], transcripts))

    def _send_one(self, episode: EpisodeRecord, outcome: Outcome) -> None:
        """Send what a message can carry, at the least without what is for people alone."""
        size = _size_of(outcome)
        if size > MAX_MESSAGE_BYTES:
            outcome = outcome.without_extras()
            size = _size_of(outcome)
        if size > MAX_MESSAGE_BYTES and isinstance(outcome, EpisodeAccepted):
            limit = f"a message to the trainer carries {MAX_MESSAGE_BYTES}"
            self._give_up(episode, f"the result and its calls have {size} bytes; {limit}")
            return
        self._sent[episode.uuid] = size
        self._link.send(outcome)

    def _give_up(self, episode: EpisodeRecord, reason: str) -> None:
        """A result cannot be delivered: fail its episode. A failure is sent without its calls."""
        with about(episode=episode.uuid, attempt=episode.attempt, client=episode.client_uuid):
            logger.error("episode.undeliverable episode_uuid=%s reason=%s", episode.uuid, reason)
        if episode.state == "ended":
            self._book.give_up(episode.uuid, reason)
            self._outcomes.remove(episode.uuid)  # The failure is offered once it is committed.
            self._interchange.settle()
        else:
            self._link.send(outcome_of(episode, {}))

    async def _transcripts(self, episode: EpisodeRecord) -> dict[int, bytes]:
        """The episode's transcripts; none if there is no room for them."""
        found = await self._store.transcripts(episode)
        if not found:
            return {}
        size = sum(map(len, found.values()))
        others = {uuid: size for uuid, size in self._on_the_way.items() if not self._is_over(uuid)}
        others.pop(episode.uuid, None)
        self._on_the_way = others
        if sum(others.values()) + size > MAX_TRANSCRIPT_BYTES:
            with about(episode=episode.uuid, attempt=episode.attempt):
                logger.warning("transcript.left_out episode_uuid=%s bytes=%d", episode.uuid, size)
            return {}
        others[episode.uuid] = size
        return found

    def _is_over(self, uuid: str) -> bool:
        return self._book.get(uuid).acknowledged


def _size_of(outcome: Outcome) -> int:
    """How many bytes the message has, at most."""
    calls = [call for each in outcome.failed_calls.values() for call in each]
    rest = outcome.without_extras()
    if isinstance(rest, EpisodeAccepted):
        calls += rest.all_calls
        rest = msgspec.structs.replace(rest, all_calls=[])
    size = len(msgspec.msgpack.encode(rest)) + sum(map(len, outcome.transcripts.values()))
    return OVERHEAD + size + sum(OVERHEAD + call.size for call in calls)


def _attempts(episode: EpisodeRecord) -> range:
    """The attempts whose calls the trainer gets: the last one, and those that failed before it."""
    return range(1 if episode.failures else max(1, episode.attempt), episode.attempt + 1)


def outcome_of(
    episode: EpisodeRecord,
    calls: Mapping[int, list[Call]],
    transcripts: Mapping[int, bytes] = MappingProxyType({}),
) -> Outcome:
    """The message that tells the trainer how an episode ended. `calls` and `transcripts`: by attempt."""
    failures: list[dict[str, object]] = [failure.model_dump() for failure in episode.failures]
    if episode.state == "failed":
        return EpisodeFailed(
            episode_uuid=episode.uuid,
            episode_type=episode.episode_type,
            group_id=episode.group_id,
            failures=failures,
            pool=episode.pool,
            group_size=episode.group_size,
            failed_calls=_failed_calls(calls, counted=0),
            transcripts=dict(transcripts),
        )
    if episode.reward is None:
        raise InterchangeError(f"episode {episode.uuid} is {episode.state} and has no result")
    output = _read(episode.result)
    return EpisodeAccepted(
        episode_uuid=episode.uuid,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
        attempt=episode.attempt,
        client_uuid=episode.client_uuid,
        queued_s=episode.queued_s,
        reward=episode.reward,
        all_calls=calls.get(episode.attempt, []),
        policy_version_at_claim=episode.policy_version,
        role_rewards=output.role_rewards,
        metadata=output.metadata,
        log_metrics=output.log_metrics,
        is_success=output.is_success,
        retries=failures,
        pool=episode.pool,
        group_size=episode.group_size,
        failed_calls=_failed_calls(calls, counted=episode.attempt),
        transcripts=dict(transcripts),
    )


def _within_64_bits(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)


class _Output(msgspec.Struct):
    """The fields of a stored `WorkflowOutput` that the trainer gets beside the reward."""

    role_rewards: dict[str, float] = {}
    metadata: dict[str, object] = {}
    log_metrics: dict[str, float] = {}
    is_success: bool | None = None


def _read(result: bytes) -> _Output:
    """A stored result; an integer that msgpack cannot hold becomes a float."""
    output = msgspec.json.decode(result, type=_Output)
    try:
        msgspec.msgpack.encode(output.metadata)
    except OverflowError:
        output.metadata = json.loads(result, parse_int=_within_64_bits)["metadata"]
    return output


def _failed_calls(calls: Mapping[int, list[Call]], *, counted: int) -> dict[int, list[Call]]:
    """The calls of the attempts but the one that counts, the last ones first, within `MAX_FAILED_BYTES`."""
    found: dict[int, list[Call]] = {}
    left = MAX_FAILED_BYTES
    for attempt in sorted(calls, reverse=True):
        left -= sum(call.size for call in calls[attempt])
        if left < 0:
            break
        if attempt != counted and calls[attempt]:
            found[attempt] = calls[attempt]
    return found
