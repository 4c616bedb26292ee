"""`Runner` runs a rollout function over the server's episodes, several at a time, until stopped.

Every claim is renewed while it is worked on, and then ended, aborted with a reason, or known to be lost.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from tinkerscript.client.async_client import AsyncTinkerScriptClient
from tinkerscript.client.episode import (
    Episode,
    Heartbeats,
    HeldClaim,
    RolloutFunction,
    as_output,
    run_rollout,
)
from tinkerscript.client.operations import LAST_REQUEST_S, TASK_ERROR
from tinkerscript.client.sync_client import TinkerScriptClient
from tinkerscript.errors import (
    ClaimLostError,
    NoEpisodeError,
    RequestRefusedError,
    RunFailedError,
    RunFinishedError,
    ServerUnreachableError,
    WrongTaskError,
)
from tinkerscript.logs import about
from tinkerscript.protocol import (
    HANDED_BACK,
    RUN_FINISHED,
    TRAINER_POOL,
    ClaimType,
    WorkflowOutput,
    failure_line,
)

logger = logging.getLogger(__name__)

DEFAULT_GRACE_S = 20.0  # With 10 s for the process to exit, Kubernetes' and Slurm's default.
INTERRUPT_GRACE_S = 2.0  # After SIGINT, which people send.
FINISHED_GRACE_S = 1.0  # The trainer needs no more results.
DEFAULT_GIVE_UP_AFTER_S = 600.0
DEFAULT_SUMMARY_EVERY_S = 10.0

# Short, so that a stop takes effect without abandoning a claim in flight.
_POLL_S = 1.0

_MAX_PER_CLAIM = 256


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """The outcomes of a run's episodes: claimed = ended + failed + lost + handed_back + running."""

    claimed: int = 0
    ended: int = 0
    failed: int = 0
    """The rollout raised or returned no usable reward."""

    lost: int = 0
    """The claim lost its lease."""

    handed_back: int = 0
    """The run was stopped."""

    @property
    def running(self) -> int:
        return self.claimed - self.ended - self.failed - self.lost - self.handed_back


class Runner:
    """One run of a rollout function over episodes. Call `run` only once."""

    def __init__(
        self,
        rollout: RolloutFunction,
        *,
        client: TinkerScriptClient | AsyncTinkerScriptClient,
        concurrency: int = 1,
        episode_type: ClaimType = "any",
        pool: str = TRAINER_POOL,
        max_episodes: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        grace_s: float = DEFAULT_GRACE_S,
        give_up_after_s: float | None = DEFAULT_GIVE_UP_AFTER_S,
        summary_every_s: float = DEFAULT_SUMMARY_EVERY_S,
    ) -> None:
        """Configure a run. Raises ValueError for a number out of range.

        If its claim is lost, an async rollout is cancelled. A plain function cannot be stopped, but its model
        calls are refused, and it can call `episode.check()`.

        Args:
            rollout: The function to run for each episode, plain or async.
            client: The server and identity to use. The run opens its own connections.
            concurrency: Episodes at a time.
            episode_type: Which episodes to claim.
            pool: The trainer's episodes, or a client's own (`client.pool`).
            max_episodes: Claim at most this many. None: no limit.
            should_stop: Called before each claim; True ends the run.
            grace_s: Seconds for running episodes to finish after a stop.
            give_up_after_s: Seconds to wait for an unreachable server. None: no limit.
            summary_every_s: Seconds between log lines that summarize the run.
        """
        if concurrency < 1 or (max_episodes is not None and max_episodes < 1):
            raise ValueError(f"concurrency={concurrency} and max_episodes={max_episodes} must be at least 1")
        self._rollout = rollout
        self._client = client if isinstance(client, AsyncTinkerScriptClient) else client.asynchronous
        self._client.settings  # noqa: B018 - raises for an environment that names no server
        self._concurrency = concurrency
        self._episode_type: ClaimType = episode_type
        self._pool = pool
        self._left = max_episodes
        self._should_stop = should_stop or (lambda: False)
        self._grace_s = grace_s
        self._give_up_after_s = give_up_after_s
        self._summary_every_s = summary_every_s
        self._stopping = asyncio.Event()
        self._claiming: set[asyncio.Task[Any]] = set()
        self._claim_lock = asyncio.Lock()
        self._ready: deque[Episode] = deque()
        self._logged_wait = ""

        # A repeated failure is logged without a traceback.
        self._last_failure = ""
        self.has_failed = False
        self._idle = 0

        self._counts = dict.fromkeys(RunStatistics.__slots__, 0)

    def statistics(self) -> RunStatistics:
        return RunStatistics(**self._counts)

    def stop(self, *, grace_s: float | None = None) -> None:
        """Stop claiming, finish claimed episodes within `grace_s` seconds, and hand back the rest.

        Call it on the run's event loop.
        """
        if grace_s is not None:
            self._grace_s = min(grace_s, self._grace_s)
        self._stopping.set()

    async def run(self) -> RunStatistics:
        """Work until stopped, `max_episodes` are done, the run finishes, or the server is gone too long.

        Raises ServerUnreachableError or RequestRefusedError if no episode can be claimed, and WrongTaskError
        if the rollout raises it.
        """
        async with self._client.with_timeout(self._give_up_after_s) as client:
            heartbeats = Heartbeats(client.heartbeat_episode)
            parts = (heartbeats.run(), self._log_summaries(), self._watch_for_the_end(client))
            helpers = [asyncio.create_task(part) for part in parts]
            slots = [asyncio.create_task(self._slot(client, heartbeats)) for _ in range(self._concurrency)]
            try:
                await self._watch(slots, helpers)
            finally:
                for task in (*slots, *helpers):
                    task.cancel()
                await asyncio.wait((*slots, *helpers))
                for episode in self._ready:  # Claimed, but all slots have ended.
                    self._counts["claimed"] += 1
                    await self._settle_quickly(client, episode, None)
            _raise_first([*slots, *helpers])
        return self.statistics()

    async def _log_summaries(self) -> None:
        loop = asyncio.get_running_loop()
        before, since = self.statistics(), loop.time()
        while True:
            await asyncio.sleep(self._summary_every_s)
            now, at = self.statistics(), loop.time()
            if now.running or now != before:
                logger.info("%s", summary_line(now, 60.0 * (now.ended - before.ended) / (at - since)))
            before, since = now, at

    async def _watch_for_the_end(self, client: AsyncTinkerScriptClient) -> None:
        # All slots may be busy when the run finishes. The next claim reports errors.
        with suppress(RequestRefusedError, ServerUnreachableError):
            try:
                if await client.await_run_end():
                    self._finish(RunFinishedError(RUN_FINISHED))
            except RunFailedError as failed:
                self._finish(failed)

    def _finish(self, why: RunFinishedError) -> None:
        if self._left != 0 or not self._stopping.is_set():
            logger.info("%s", why)
        self.has_failed = self.has_failed or isinstance(why, RunFailedError)
        self._left = 0
        self.stop(grace_s=FINISHED_GRACE_S)

    async def _watch(self, slots: list[asyncio.Task[None]], helpers: list[asyncio.Task[None]]) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        pending: set[asyncio.Task[Any]] = {*slots, *helpers, stopping}
        try:
            while pending & set(slots) and not stopping.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() for task in done):
                    self.stop()
        finally:
            stopping.cancel()
            await asyncio.wait([stopping])
        await self._wind_down(pending & set(slots))

    async def _wind_down(self, running: set[asyncio.Task[Any]]) -> None:
        first_s = min(_POLL_S + 1.0, self._grace_s)
        if running:
            _, running = await asyncio.wait(running, timeout=first_s)
        for task in self._claiming:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=self._grace_s - first_s)

    async def _slot(self, client: AsyncTinkerScriptClient, heartbeats: Heartbeats) -> None:
        while (episode := await self._next_episode(client)) is not None:
            self._counts["claimed"] += 1
            if self._stopping.is_set():
                await self._settle_quickly(client, episode, None)
            else:
                with _log_context(episode), heartbeats.holding(episode) as held:
                    await self._work(client, held)

    async def _next_episode(self, client: AsyncTinkerScriptClient) -> Episode | None:
        # The lock lets one request claim for all idle slots.
        self._idle += 1
        try:
            async with self._claim_lock:
                if not self._ready:
                    self._ready.extend(await self._claim(client))
                return self._ready.popleft() if self._ready else None
        finally:
            self._idle -= 1

    async def _claim(self, client: AsyncTinkerScriptClient) -> Sequence[Episode]:
        while not self._stopping.is_set() and not self._should_stop() and self._left != 0:
            wanted = min(self._idle, _MAX_PER_CLAIM, self._idle if self._left is None else self._left)
            try:
                with self._interruptible():
                    episodes = await client.begin_episodes(
                        wanted, self._episode_type, wait_s=_POLL_S, pool=self._pool
                    )
            except NoEpisodeError as error:
                self._log_wait(str(error))
                continue
            except RunFinishedError as finished:
                self._finish(finished)
                break
            self._logged_wait = ""
            self._left = None if self._left is None else self._left - len(episodes)
            return episodes
        return ()

    def _log_wait(self, reason: str) -> None:
        if reason != self._logged_wait and not self._ready and not self.statistics().running:
            self._logged_wait = reason
            logger.info("waiting for an episode: %s", reason)

    @contextmanager
    def _interruptible(self) -> Generator[None]:
        # A task that waits for an episode is safe to cancel.
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._claiming.add(task)
        try:
            yield
        finally:
            self._claiming.discard(task)

    async def _work(self, client: AsyncTinkerScriptClient, held: HeldClaim) -> None:
        # The episode is settled even if this task is cancelled.
        episode, output = held.episode, None
        try:
            output = as_output(await run_rollout(self._rollout, held))
            await client.end_episode(episode, output)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                await self._fail(client, episode, error)
                return
            await self._settle_quickly(client, episode, output)
            raise
        except ClaimLostError as error:
            if episode.lost:
                self._lost(episode, error)
            else:  # Raised by a model call or another episode; the server decides about this one.
                await self._fail(client, episode, error)
        except WrongTaskError as error:
            # Every episode of that task would fail here, but another worker can run it.
            await self._settle_quickly(client, episode, None, reason=str(error))
            raise
        except ServerUnreachableError as error:
            if output is None:
                await self._fail(client, episode, error)
                return
            self._lost(episode, error)
            raise
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raised is recorded
            await self._fail(client, episode, error)
        else:
            self._counts["ended"] += 1

    async def _fail(self, client: AsyncTinkerScriptClient, episode: Episode, error: BaseException) -> None:
        reason = failure_line(error)
        is_new = reason != self._last_failure
        self._last_failure = reason
        logger.warning(
            "episode %s failed: %s", episode.episode_uuid, reason, exc_info=error if is_new else None
        )
        try:
            await client.abort_episode(episode, reason, TASK_ERROR)
        except ServerUnreachableError:
            raise
        except Exception as lost:  # noqa: BLE001 - its lease expires, and the other episodes go on
            self._lost(episode, lost)
        else:
            self._counts["failed"] += 1

    async def _settle_quickly(
        self,
        client: AsyncTinkerScriptClient,
        episode: Episode,
        output: WorkflowOutput | None,
        *,
        reason: str = "the worker was stopped",
    ) -> None:
        # If it takes too long, the lease expires instead.
        try:
            async with asyncio.timeout(LAST_REQUEST_S):
                if output is None:
                    await client.abort_episode(episode, reason, HANDED_BACK)
                else:
                    await client.end_episode(episode, output)
        except Exception as error:  # noqa: BLE001 - its lease expires, and the other episodes go on
            self._lost(episode, error)
        else:
            self._counts["handed_back" if output is None else "ended"] += 1

    def _lost(self, episode: Episode, error: Exception) -> None:
        logger.warning("episode %s: the claim is lost: %s", episode.episode_uuid, failure_line(error))
        self._counts["lost"] += 1


def run(
    rollout: RolloutFunction,
    *,
    client: TinkerScriptClient | AsyncTinkerScriptClient,
    concurrency: int = 1,
    episode_type: ClaimType = "any",
    pool: str = TRAINER_POOL,
    max_episodes: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    give_up_after_s: float | None = DEFAULT_GIVE_UP_AFTER_S,
    summary_every_s: float = DEFAULT_SUMMARY_EVERY_S,
) -> RunStatistics:
    """Run `rollout` over the server's episodes until SIGTERM, SIGINT or `should_stop` ends the run.

    It takes and raises the same as `Runner`. In a program with an event loop, use `await Runner(...).run()`.
    Signals are handled only on the main thread.
    """
    runner = Runner(
        rollout,
        client=client,
        concurrency=concurrency,
        episode_type=episode_type,
        pool=pool,
        max_episodes=max_episodes,
        should_stop=should_stop,
        grace_s=grace_s,
        give_up_after_s=give_up_after_s,
        summary_every_s=summary_every_s,
    )
    return asyncio.run(stopped_by_signals(runner))


async def stopped_by_signals(
    runner: Runner,
    *,
    first: Callable[[signal.Signals], object] = lambda number: None,
    second: Callable[[signal.Signals], object] = signal.raise_signal,
) -> RunStatistics:
    """Run `runner`; on the main thread, SIGTERM and SIGINT stop it gracefully.

    The first signal calls `first`, and later ones call `second` even while a rollout blocks the event loop.
    By default, the second has its usual effect.
    """
    loop = asyncio.get_running_loop()
    received = list[signal.Signals]()

    def stop(number: int, _: object) -> None:
        received.append(signal.Signals(number))
        if len(received) > 1:
            restore()
            second(received[-1])
            return
        first(received[0])
        grace_s = INTERRUPT_GRACE_S if number == signal.SIGINT else None
        loop.call_soon_threadsafe(partial(runner.stop, grace_s=grace_s))

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    on_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if on_main_thread else ()
    # The loop's own handlers would wait for code that blocks the loop.
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        return await runner.run()
    finally:
        restore()


def summary_line(statistics: RunStatistics, ended_per_minute: float) -> str:
    return (
        f"episodes: claimed={statistics.claimed} ended={statistics.ended} failed={statistics.failed} "
        f"lost={statistics.lost} handed_back={statistics.handed_back} running={statistics.running} "
        f"ended_per_minute={ended_per_minute:.1f}"
    )


def _log_context(episode: Episode) -> AbstractContextManager[None]:
    name, attempt, client = episode.episode_uuid, episode.attempt, episode.client_uuid
    return about(run=episode.run, episode=name, attempt=attempt, client=client)


def _raise_first(slots: list[asyncio.Task[None]]) -> None:
    for slot in slots:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            raise error
