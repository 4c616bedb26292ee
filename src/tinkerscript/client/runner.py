"""Run a rollout function over the server's episodes, several at once, until told to stop.

Owns the claims that it makes: each one is ended, aborted with its reason, or known to be lost. Stopping
finishes what is claimed within a grace period and hands the rest back; a server that restarts is waited for.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from pydantic import JsonValue

from tinkerscript.client.async_client import AsyncTinkerScriptClient
from tinkerscript.client.core import ClientSettings, Episode, failure_line
from tinkerscript.client.sync_client import TinkerScriptClient
from tinkerscript.errors import ClaimLostError, ClientError, NoEpisodeError, ServerUnreachableError
from tinkerscript.protocol import TRAINER_POOL, ClaimType, WorkflowOutput

logger = logging.getLogger(__name__)

RolloutResult = float | WorkflowOutput | tuple[float, dict[str, JsonValue]]
"""What a rollout returns: a reward, a reward with metadata, or the whole output."""

Rollout = Callable[[Episode], RolloutResult] | Callable[[Episode], Awaitable[RolloutResult]]
"""A plain function (run on a thread of its own) or an async function."""

STOPPED = "worker_stopped"
"""Kind of the failure by which an episode is handed back."""

DEFAULT_GRACE_S = 30.0
DEFAULT_GIVE_UP_AFTER_S = 600.0

_POLL_S = 1.0
"""Seconds that one claim may wait, so that a stop is noticed without abandoning a claim."""

_MOST_EPISODES = 256
"""Episodes that one request claims at most."""

_LAST_WORDS_S = 5.0
"""Seconds that handing in or handing back may take once the grace period is over."""


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """What became of the episodes of one run. claimed = ended + failed + lost + handed_back + running."""

    claimed: int = 0
    ended: int = 0
    """Result stored."""

    failed: int = 0
    """The rollout raised, or returned no usable reward; the reason is recorded."""

    lost: int = 0
    """The claim lost its lease meanwhile."""

    handed_back: int = 0
    """Given back because the run was stopped."""


class Runner:
    """One run of a rollout function. `run` may be called once."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        client: TinkerScriptClient | AsyncTinkerScriptClient,
        concurrency: int = 1,
        episode_type: ClaimType = "any",
        pool: str = TRAINER_POOL,
        max_episodes: int | None = None,
        should_stop: Callable[[], bool] | None = None,
        grace_s: float = DEFAULT_GRACE_S,
        give_up_after_s: float | None = DEFAULT_GIVE_UP_AFTER_S,
        report_every_s: float = 60.0,
    ) -> None:
        """`client` says which server and as whom; the run makes connections of its own.

        A claim is renewed while its rollout runs; once it is lost, an async rollout is cancelled, and a plain
        one finds `episode.lost` set. `pool` says whose episodes are claimed.

        `max_episodes` claims at most; `should_stop` is asked before each claim; `grace_s` seconds are
        given to what is running when the run is stopped; `give_up_after_s` seconds an unreachable
        server is waited for (None: for ever). Every `report_every_s` seconds one line is logged.
        Raises ValueError for a number out of range.
        """
        if concurrency < 1 or (max_episodes is not None and max_episodes < 1):
            raise ValueError(f"concurrency={concurrency} and max_episodes={max_episodes} must be at least 1")
        self._rollout = rollout
        self._settings = client.settings
        self._concurrency = concurrency
        self._episode_type: ClaimType = episode_type
        self._pool = pool
        self._left = max_episodes
        self._should_stop = should_stop or (lambda: False)
        self._grace_s = grace_s
        self._give_up_after_s = give_up_after_s
        self._report_every_s = report_every_s
        self._stopping = asyncio.Event()
        self._claiming: set[asyncio.Task[Any]] = set()
        self._claim_lock = asyncio.Lock()
        self._ready: deque[Episode] = deque()
        """Claimed for slots that have not taken them yet."""

        self._idle = 0
        """Slots that wait for an episode."""

        self._counts = dict.fromkeys(RunStatistics.__slots__, 0)

    def statistics(self) -> RunStatistics:
        """A snapshot of the counters."""
        return RunStatistics(**self._counts)

    def stop(self) -> None:
        """Claim no more; finish or hand back what is claimed. Call it on the run's event loop."""
        self._stopping.set()

    async def run(self) -> RunStatistics:
        """Work until stopped, out of `max_episodes`, or the server is away for too long.

        Raises ServerUnreachableError or RequestRefusedError when no episode can be claimed.
        """
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(_twin(self._settings, self._give_up_after_s))
            slots = [asyncio.create_task(self._slot(client)) for _ in range(self._concurrency)]
            reporting = asyncio.create_task(self._report())
            try:
                await self._supervise(slots)
            finally:
                for task in (*slots, reporting):
                    task.cancel()
                await asyncio.wait((*slots, reporting))
                for episode in self._ready:  # Claimed, and no slot lived to take it.
                    self._counts["claimed"] += 1
                    await self._last_words(client, episode, None)
            _raise_first(slots)
        return self.statistics()

    async def _report(self) -> None:
        """One line every `report_every_s` seconds."""
        ended = 0
        while True:
            await asyncio.sleep(self._report_every_s)
            now = self.statistics()
            running = now.claimed - now.ended - now.failed - now.lost - now.handed_back
            a_minute = 60 * (now.ended - ended) / self._report_every_s
            logger.info(
                "worker %s: %d ended (%.0f a minute), %d running, %d failed, %d lost, %d handed back",
                *(self._settings.client_uuid, now.ended, a_minute, running),
                *(now.failed, now.lost, now.handed_back),
            )
            ended = now.ended

    async def _supervise(self, slots: list[asyncio.Task[None]]) -> None:
        """Return when all slots are done, one failed, or the grace period after a stop is over."""
        stopping = asyncio.create_task(self._stopping.wait())
        pending: set[asyncio.Task[Any]] = {*slots, stopping}
        try:
            while pending - {stopping} and not stopping.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(task.exception() for task in done):
                    self.stop()
        finally:
            stopping.cancel()
            await asyncio.wait([stopping])
        await self._wind_down(pending - {stopping})

    async def _wind_down(self, running: set[asyncio.Task[Any]]) -> None:
        """Let a claim that is on its way arrive, then let what is claimed finish, within the grace period."""
        first_s = min(_POLL_S + 1.0, self._grace_s)
        if running:
            _, running = await asyncio.wait(running, timeout=first_s)
        for task in self._claiming:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=self._grace_s - first_s)

    async def _slot(self, client: AsyncTinkerScriptClient) -> None:
        while (episode := await self._next_episode(client)) is not None:
            self._counts["claimed"] += 1
            if self._stopping.is_set():
                await self._last_words(client, episode, None)
            else:
                await self._work(client, episode)

    async def _next_episode(self, client: AsyncTinkerScriptClient) -> Episode | None:
        """The next episode for this slot; None when the run takes no more.

        One request at a time claims for every slot that is idle when it is made.
        """
        self._idle += 1
        try:
            async with self._claim_lock:
                if not self._ready:
                    self._ready.extend(await self._claim(client))
                return self._ready.popleft() if self._ready else None
        finally:
            self._idle -= 1

    async def _claim(self, client: AsyncTinkerScriptClient) -> Sequence[Episode]:
        """At least one episode; none when this run takes no more."""
        while not self._stopping.is_set() and not self._should_stop() and self._left != 0:
            wanted = min(self._idle, _MOST_EPISODES, self._idle if self._left is None else self._left)
            try:
                with self._interruptible():
                    episodes = await client.begin_episodes(
                        wanted, self._episode_type, wait_s=_POLL_S, pool=self._pool
                    )
            except NoEpisodeError:
                continue
            self._left = None if self._left is None else self._left - len(episodes)
            return episodes
        return ()

    @contextmanager
    def _interruptible(self) -> Generator[None]:
        """Marks the current task as one that waits for an episode and holds none."""
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._claiming.add(task)
        try:
            yield
        finally:
            self._claiming.discard(task)

    async def _work(self, client: AsyncTinkerScriptClient, episode: Episode) -> None:
        """See one claimed episode to its end, also when this task is cancelled."""
        output: WorkflowOutput | None = None
        try:
            output = await self._output(client, episode)
            await client.end_episode(episode, output)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                await self._fail(client, episode, error)
                return
            await self._last_words(client, episode, output)
            raise
        except ClaimLostError as error:
            self._lost(episode, error)
        except ServerUnreachableError as error:
            if output is None:
                await self._fail(client, episode, error)
                return
            self._lost(episode, error)
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the user's code raised is recorded
            await self._fail(client, episode, error)
        else:
            self._counts["ended"] += 1

    async def _output(self, client: AsyncTinkerScriptClient, episode: Episode) -> WorkflowOutput:
        """What the rollout returns. Its claim is renewed meanwhile. Raises ClaimLostError once it is lost."""
        rollout = asyncio.create_task(self._rolled_out(episode))
        renewing = asyncio.create_task(client.renew_until_lost(episode))
        try:
            await asyncio.wait((rollout, renewing), return_when=asyncio.FIRST_COMPLETED)
            if rollout.done():
                return rollout.result()
            raise ClaimLostError(renewing.result())
        finally:
            for task in (rollout, renewing):
                task.cancel()
            await asyncio.gather(rollout, renewing, return_exceptions=True)

    async def _rolled_out(self, episode: Episode) -> WorkflowOutput:
        if _is_async(self._rollout):
            rollout = cast("Callable[[Episode], Awaitable[object]]", self._rollout)
            return as_output(await rollout(episode))
        return as_output(await _in_thread(cast("Callable[[Episode], object]", self._rollout), episode))

    async def _fail(self, client: AsyncTinkerScriptClient, episode: Episode, error: BaseException) -> None:
        reason = failure_line(error)
        logger.warning("episode %s failed: %s", episode.episode_uuid, reason, exc_info=error)
        try:
            await client.abort_episode(episode, reason, "task_error")
        except ClaimLostError as lost:
            self._lost(episode, lost)
        else:
            self._counts["failed"] += 1

    async def _last_words(
        self, client: AsyncTinkerScriptClient, episode: Episode, output: WorkflowOutput | None
    ) -> None:
        """Within seconds hand in the result, or hand the episode back; the lease covers the rest."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                if output is None:
                    await client.abort_episode(episode, "the worker was stopped", STOPPED)
                else:
                    await client.end_episode(episode, output)
        except (ClientError, TimeoutError) as error:
            self._lost(episode, error)
        else:
            self._counts["handed_back" if output is None else "ended"] += 1

    def _lost(self, episode: Episode, error: Exception) -> None:
        logger.warning("episode %s is lost to this worker: %s", episode.episode_uuid, failure_line(error))
        self._counts["lost"] += 1


def run(
    rollout: Rollout,
    *,
    client: TinkerScriptClient | AsyncTinkerScriptClient,
    concurrency: int = 1,
    episode_type: ClaimType = "any",
    pool: str = TRAINER_POOL,
    max_episodes: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    grace_s: float = DEFAULT_GRACE_S,
    give_up_after_s: float | None = DEFAULT_GIVE_UP_AFTER_S,
) -> RunStatistics:
    """Run `rollout` over the server's episodes until SIGTERM, SIGINT or `should_stop` ends it.

    The parameters, and the errors raised, are those of `Runner`. In a program with an event loop of its
    own use `await Runner(...).run()`. Signals are handled when this is called on the main thread.
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
    )
    return asyncio.run(stopped_by_signals(runner))


async def stopped_by_signals(runner: Runner) -> RunStatistics:
    """Run `runner`; on the main thread SIGTERM and SIGINT stop it gracefully."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, runner.stop)
                stack.callback(loop.remove_signal_handler, number)
        return await runner.run()


def as_output(result: object) -> WorkflowOutput:
    """What a rollout returned as a WorkflowOutput. Raises TypeError that names what came instead."""
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


def _twin(settings: ClientSettings, give_up_after_s: float | None) -> AsyncTinkerScriptClient:
    return AsyncTinkerScriptClient(
        settings.server_url,
        client_uuid=settings.client_uuid,
        token=settings.token,
        timeout_s=give_up_after_s,
        allow_discard_timeout=settings.allow_discard_timeout,
    )


def _raise_first(slots: list[asyncio.Task[None]]) -> None:
    for slot in slots:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            raise error


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


def _is_async(rollout: Rollout) -> bool:
    """Whether calling `rollout`, a function or an object with `__call__`, gives an awaitable."""
    return inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(type(rollout).__call__)
