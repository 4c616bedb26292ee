"""Held claims: heartbeats keep their leases alive while the user's rollout, plain or async, runs.

Invariant: a claim is renewed from `holding` until that block ends, with at most `MAX_IN_FLIGHT` requests at a
time for one `Heartbeats`. Once the server reports a claim lost, it is no longer renewed, and its holder is
notified once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import cast

from pydantic import JsonValue

from tinkerscript.client.episode import Episode
from tinkerscript.client.operations import heartbeat_interval_s
from tinkerscript.errors import ClientError
from tinkerscript.protocol import WorkflowOutput

logger = logging.getLogger(__name__)


MAX_IN_FLIGHT = 8
"""Heartbeat requests at once."""


class HeldClaim:
    """One claim that is renewed."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.on_lost: Callable[[], None] | None = None
        """Called on the event loop when a heartbeat learns that the claim is lost."""

        self.is_open = True
        self.timer: asyncio.TimerHandle | None = None
        self.beat: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def canceling_the_block(self) -> AsyncGenerator[None]:
        """Cancel this block when a heartbeat learns that the claim is lost; it then raises ClaimLostError."""
        scope = asyncio.timeout(None)  # Cancels its block, and tells this from another cancellation.
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
        """Send no further heartbeat."""
        self.is_open = False
        if self.timer is not None:
            self.timer.cancel()
        if self.beat is not None:
            self.beat.cancel()


class Heartbeats:
    """Renews the claims that are held, with one asyncio task. `run` does the work and owns every request."""

    def __init__(self, heartbeat: Callable[[Episode], Awaitable[object]]) -> None:
        """`heartbeat` renews one claim, and marks its lease lost if the claim is gone."""
        self._heartbeat = heartbeat
        self._due: asyncio.Queue[HeldClaim] = asyncio.Queue()
        """Bounded by the number of claims that are held."""

        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    @contextmanager
    def holding(self, episode: Episode) -> Generator[HeldClaim]:
        """Renew `episode` while this block runs. On the event loop of `run`."""
        held = HeldClaim(episode)
        self._schedule(held)
        try:
            yield held
        finally:
            held.close()

    async def run(self) -> None:
        """Renew what is due, until canceled."""
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
        except ClientError as error:
            _warn(held.episode, error)
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
            async with held.canceling_the_block():
                yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])


@contextmanager
def renewed_by_thread(
    episode: Episode, heartbeat: Callable[[Episode, Callable[[float], object]], object]
) -> Generator[None]:
    """Renew `episode` while this block runs, on a thread that ends with the block.

    `heartbeat(episode, sleep)` renews the claim and pauses between tries with `sleep`.
    """
    stop = threading.Event()

    def sleep(delay_s: float) -> None:
        if stop.wait(delay_s):
            raise _BlockEndedError

    def renew() -> None:
        with suppress(_BlockEndedError):
            while not episode.lease.is_over:
                sleep(heartbeat_interval_s(episode))
                try:
                    heartbeat(episode, sleep)
                except ClientError as error:
                    _warn(episode, error)

    thread = threading.Thread(target=renew, name=f"heartbeat-{episode.episode_uuid}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class _BlockEndedError(Exception):
    """The block ended while its heartbeat slept."""


def _warn(episode: Episode, error: ClientError) -> None:
    logger.warning("episode %s could not be renewed; trying again: %s", episode.episode_uuid, error)


RolloutResult = float | WorkflowOutput | tuple[float, dict[str, JsonValue]]
"""What a rollout returns: a reward, a reward with metadata, or the whole output."""


RolloutFunction = Callable[[Episode], RolloutResult] | Callable[[Episode], Awaitable[RolloutResult]]
"""A plain function (run on a thread of its own) or an async function."""


def as_output(result: object) -> WorkflowOutput:
    """A rollout's result as a WorkflowOutput. Raises TypeError, with the type, for anything else."""
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
    """Run `rollout` for the episode that is held; returns its result.

    Raises what it raises, and ClaimLostError if a heartbeat learns meanwhile that the claim is lost.
    """
    if _is_async(rollout):
        result: object = None
        async with held.canceling_the_block():
            result = await cast("Callable[[Episode], Awaitable[object]]", rollout)(held.episode)
    else:
        result = await _in_thread(cast("Callable[[Episode], object]", rollout), held.episode)
    held.episode.check()
    return result


async def _in_thread(rollout: Callable[[Episode], object], episode: Episode) -> object:
    """Run a plain function on a daemon thread: a rollout that never returns cannot keep the process alive."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = rollout(episode)
        except BaseException as error:  # noqa: BLE001 - raised again by the task that waits for this thread
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=f"rollout-{episode.episode_uuid}", daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return result


def _is_async(rollout: RolloutFunction) -> bool:
    """Whether calling `rollout`, a function or an object with `__call__`, gives an awaitable."""
    return inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(type(rollout).__call__)
