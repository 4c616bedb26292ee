"""`Episode` is one claim of an episode, with its `Lease` and the heartbeats that renew it.

A lease changes once, from held to lost or settled. A heartbeat's "lost" is ignored while a result is being
handed in.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import random
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import JsonValue

from tinkerscript.client.settings import ClientSettings
from tinkerscript.errors import ClaimLostError
from tinkerscript.protocol import (
    DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
    POLICY,
    EpisodeClaim,
    EpisodeType,
    WorkflowOutput,
    bounded,
    call_id_of,
)

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 8

BEATS_PER_LEASE = 3

CLOSED = "the client was closed"

LAST = "last"  # The policy's last recorded call, in place of a reply's id.


class Lease:
    """Whether a claim still counts, as far as this process knows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settling = 0
        self._settled = False
        self._lost_because = ""

    @property
    def lost_because(self) -> str:
        """Why the server no longer accepts a result; empty while it does."""
        return self._lost_because

    @property
    def is_over(self) -> bool:
        return self._settled or bool(self._lost_because)

    def lose(self, reason: str) -> None:
        with self._lock:
            if not self._settling and not self._settled:
                self._lost_because = self._lost_because or reason or "the server gave no reason"

    @contextmanager
    def settling(self) -> Generator[None]:
        """Settle the claim in this block. A ClaimLostError is kept as the reason."""
        with self._lock:
            self._settling += 1
        settled, lost = False, ""
        try:
            yield
            settled = True
        except ClaimLostError as error:
            lost = str(error)
            raise
        finally:
            with self._lock:
                self._settling -= 1
                self._settled = self._settled or settled
                if lost and not self._settled:
                    self._lost_because = self._lost_because or lost


@dataclass(frozen=True)
class EpisodeModelAddress:
    """How an OpenAI client calls one model of a claim."""

    base_url: str  # Ends in `/v1`.
    api_key: str = field(repr=False)
    name: str  # The `model` field of requests.


@dataclass(frozen=True)
class Episode:
    """One claim of an episode: what to do, and the model to do it with."""

    episode_uuid: str
    attempt: int
    """Which claim of the episode this is, from 1."""

    payload: dict[str, Any]
    """The JSON that the trainer registered, such as `payload["sample"]["input"]`."""

    episode_type: EpisodeType
    group_id: str
    openai_base_url: str
    """For OpenAI's clients; ends in `/v1`."""

    openai_api_key: str = field(repr=False)
    """Valid while the claim holds its lease."""

    client_uuid: str = ""
    policy_version: int | None = None
    """The version at the time of the claim."""

    allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S
    """Seconds without a model call or heartbeat after which the claim expires."""

    max_claim_s: float = 0.0
    """Seconds after which the claim ends regardless; 0 if the server did not say."""

    max_transcript_bytes: int = 0
    """The longest transcript that the server accepts; 0 if it accepts none."""

    roles: tuple[str, ...] = ()
    """Names for `model`, in addition to the policy's."""

    run: str = ""
    server_url: str = ""
    """For requests other than model calls, which go to the gateway process."""

    lease: Lease = field(default_factory=Lease, repr=False, compare=False)
    call_rewards: dict[str, float] = field(default_factory=dict[str, float], repr=False, compare=False)
    """Rewards by call id, handed in with the result."""

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's clients, which append `/v1/messages`."""
        return self.openai_base_url.removesuffix("/v1")

    @property
    def lost(self) -> bool:
        """Whether the server said that a result of this claim no longer counts.

        Poll it or call `check` in a long computation. When a heartbeat learns of the loss, an `async with`
        block is cancelled and raises ClaimLostError.
        """
        return bool(self.lease.lost_because)

    def model(self, role: str = POLICY) -> EpisodeModelAddress:
        """Return the address of a role's model, such as `episode.model("judge")`."""
        return EpisodeModelAddress(self.openai_base_url, self.openai_api_key, role)

    def reward(self, call: str, reward: float) -> Any:
        """Reward one model call of the policy, by the `id` of its reply or `last`.

        Rewards of a call add up, and count in addition to the episode's. In an async program, await this
        before the next call. Raises ValueError for a reward above 1e6 in magnitude, and for `last`,
        RequestRefusedError (404) before the first call and ServerUnreachableError. The server refuses the
        result for an unknown call.
        """
        if call == LAST:
            raise ValueError(
                "reward: this episode has no client that could ask for the last call; give its id"
            )
        name, earned = call_id_of(call), bounded(f"reward of the call {call!r}", reward)
        self.call_rewards[name] = self.call_rewards.get(name, 0.0) + earned

    def on_thread(self, loop: asyncio.AbstractEventLoop) -> Episode:
        return self

    def check(self) -> None:
        """Raise ClaimLostError if `lost`. Sends nothing."""
        if self.lost:
            raise ClaimLostError(self.lease.lost_because)


def episode_fields(claim: EpisodeClaim, settings: ClientSettings) -> dict[str, Any]:
    # The server's first version did not report the lease.
    return {
        "episode_uuid": claim.episode_uuid,
        "attempt": claim.attempt,
        "payload": claim.payload,
        "episode_type": claim.episode_type,
        "group_id": claim.group_id,
        "openai_base_url": claim.openai_base_url,
        "openai_api_key": claim.openai_api_key,
        "client_uuid": settings.client_uuid,
        "policy_version": claim.policy_version,
        "allow_discard_timeout": claim.allow_discard_timeout or settings.allow_discard_timeout,
        "max_claim_s": claim.max_claim_s,
        "max_transcript_bytes": claim.max_transcript_bytes,
        "roles": tuple(claim.roles),
        "run": claim.run,
        "server_url": settings.server_url.rstrip("/"),
    }


def heartbeat_interval_s(episode: Episode) -> float:
    # At most a third of the lease, with jitter.
    return episode.allow_discard_timeout / BEATS_PER_LEASE * random.uniform(0.75, 1.0)


class HeldClaim:
    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        # Called on the event loop.
        self.on_lost: Callable[[], None] | None = None
        self.is_open = True
        self.timer: asyncio.TimerHandle | None = None
        self.beat: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def cancelling_the_block(self) -> AsyncGenerator[None]:
        """Cancel this block and raise ClaimLostError when a heartbeat learns of the loss."""
        scope = asyncio.timeout(None)  # Recognizes its own cancellation.
        try:
            async with scope:
                self.on_lost = lambda: scope.reschedule(0.0)
                try:
                    yield
                finally:
                    self.on_lost = None
        except TimeoutError:
            if not scope.expired():
                raise
        if scope.expired():
            self.episode.check()

    def close(self) -> None:
        self.is_open = False
        if self.timer is not None:
            self.timer.cancel()
        if self.beat is not None:
            self.beat.cancel()


class Heartbeats:
    """Renews held claims from a single task, `run`, which owns every request."""

    def __init__(self, heartbeat: Callable[[Episode], Awaitable[object]]) -> None:
        """`heartbeat` renews one claim, or marks its lease as lost."""
        self._heartbeat = heartbeat
        self._due: asyncio.Queue[HeldClaim] = asyncio.Queue()
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    @contextmanager
    def holding(self, episode: Episode) -> Generator[HeldClaim]:
        held = HeldClaim(episode)
        self._schedule(held)
        try:
            yield held
        finally:
            held.close()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                held = await self._due.get()
                await self._slots.acquire()
                if held.is_open:
                    held.beat = tasks.create_task(self._renew(held))
                    held.beat.add_done_callback(lambda _: self._slots.release())
                else:
                    self._slots.release()

    def _schedule(self, held: HeldClaim) -> None:
        delay_s = heartbeat_interval_s(held.episode)
        held.timer = asyncio.get_running_loop().call_later(delay_s, self._due.put_nowait, held)

    async def _renew(self, held: HeldClaim) -> None:
        try:
            await self._heartbeat(held.episode)
        except Exception as error:  # noqa: BLE001 - the other claims are renewed all the same
            uuid = held.episode.episode_uuid
            logger.warning("episode %s could not be renewed; trying again: %s", uuid, error)
        if not held.is_open:
            return
        if not held.episode.lease.is_over:
            self._schedule(held)
        elif held.episode.lost and held.on_lost is not None:
            held.on_lost()


@asynccontextmanager
async def renewed_by_task(
    episode: Episode, heartbeat: Callable[[Episode], Awaitable[object]]
) -> AsyncGenerator[None]:
    """Renew `episode` while this block runs; cancel the block when a heartbeat learns of its loss."""
    heartbeats = Heartbeats(heartbeat)
    renewing = asyncio.create_task(heartbeats.run())
    try:
        with heartbeats.holding(episode) as held:
            async with held.cancelling_the_block():
                yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])


# A reward, a reward with metadata, or the whole output.
RolloutResult = float | WorkflowOutput | tuple[float, dict[str, JsonValue]]
RolloutFunction = Callable[[Episode], RolloutResult] | Callable[[Episode], Awaitable[RolloutResult]]
"""A plain function, which gets its own thread, or an async function."""


def as_output(result: object) -> WorkflowOutput:
    if isinstance(result, WorkflowOutput):
        return result
    if isinstance(result, int | float):
        return WorkflowOutput(reward=float(result))
    match result:
        case (int() | float() as reward, dict() as metadata):
            return WorkflowOutput(reward=float(reward), metadata=cast("dict[str, JsonValue]", metadata))
        case _:
            raise TypeError(
                "a rollout returns a number, (number, metadata) or a WorkflowOutput, "
                f"not {type(result).__name__}"
            )


async def run_rollout(rollout: RolloutFunction, held: HeldClaim) -> object:
    """Raises the rollout's exceptions, or ClaimLostError if a heartbeat learns of the loss."""
    if _is_async(rollout):
        result: object = None
        async with held.cancelling_the_block():
            result = await cast("Callable[[Episode], Awaitable[object]]", rollout)(held.episode)
    else:
        result = await _in_thread(cast("Callable[[Episode], object]", rollout), held.episode)
    held.episode.check()
    return result


async def _in_thread(rollout: Callable[[Episode], object], episode: Episode) -> object:
    # A daemon thread cannot keep the process alive.
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = rollout(episode.on_thread(loop))
        except BaseException as error:  # noqa: BLE001 - raised again by the task that waits for this thread
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    run = contextvars.copy_context().run  # Log records of the thread should also name the episode.
    threading.Thread(target=run, args=(work,), name=f"rollout-{episode.episode_uuid}", daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return result


def _is_async(rollout: RolloutFunction) -> bool:
    return inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(type(rollout).__call__)
