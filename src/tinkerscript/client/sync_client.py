"""`TinkerScriptClient` is the client for ordinary, blocking programs.

It runs an `AsyncTinkerScriptClient` on an event loop in its own thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinkerscript.client.async_client import AsyncTinkerScriptClient
from tinkerscript.client.episode import CLOSED, Episode, Heartbeats
from tinkerscript.client.settings import DEFAULT_TIMEOUT_S, ClientSettings
from tinkerscript.errors import ClientClosedError
from tinkerscript.protocol import DEFAULT_ALLOW_DISCARD_TIMEOUT_S, TRAINER_POOL, ClaimType

P = ParamSpec("P")
T = TypeVar("T")

CLOSE_GRACE_S = 1.0  # For running tasks to end when the client is closed.


def _blocking(
    method: Callable[Concatenate[AsyncTinkerScriptClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[TinkerScriptClient, P], T]:
    @wraps(method)
    def call(self: TinkerScriptClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(method(self.asynchronous, *args, **kwargs))

    return call


class TinkerScriptClient:
    """Claims episodes from an interchange server and hands in their results. Thread-safe.

    Requests are retried for `timeout_s` seconds while the server is unreachable or busy.
    """

    def __init__(
        self,
        server_url: str,
        *,
        client_uuid: str | None = None,
        token: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
        ca_file: str | None = None,
    ) -> None:
        """Takes and raises the same as `AsyncTinkerScriptClient`."""
        self.asynchronous = AsyncTinkerScriptClient(
            server_url,
            client_uuid=client_uuid,
            token=token,
            timeout_s=timeout_s,
            allow_discard_timeout=allow_discard_timeout,
            ca_file=ca_file,
        )
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0
        self._is_closed = False

    @classmethod
    def from_env(cls) -> TinkerScriptClient:
        """Create a client like `AsyncTinkerScriptClient.from_env`."""
        client = cls("http://unused", token="")
        client.asynchronous = AsyncTinkerScriptClient.from_env()
        return client

    @property
    def settings(self) -> ClientSettings:
        return self.asynchronous.settings

    @property
    def pool(self) -> str:
        """The pool that `register_episode` fills."""
        return self.settings.pool

    def begin_episode(
        self,
        episode_type: ClaimType = "any",
        wait_s: float | None = None,
        *,
        pool: str = TRAINER_POOL,
        heartbeat: bool = True,
    ) -> ClaimedEpisode:
        """Claim an episode, waiting up to `wait_s` seconds for one (None: no limit).

        `pool` selects the trainer's episodes or a client's own (`client.pool`). A `with` block gives the
        episode back if it raises, and with `heartbeat` renews the claim meanwhile (see `Episode.lost`).
        Raises NoEpisodeError, RunFinishedError, ServerUnreachableError or RequestRefusedError.
        """
        (episode,) = self.begin_episodes(1, episode_type, wait_s, pool=pool, heartbeat=heartbeat)
        return episode

    def begin_episodes(
        self,
        max_episodes: int,
        episode_type: ClaimType = "any",
        wait_s: float | None = None,
        *,
        pool: str = TRAINER_POOL,
        heartbeat: bool = True,
    ) -> list[ClaimedEpisode]:
        """Claim up to `max_episodes` (at most 256) with one request.

        Waits and raises like `begin_episode`.
        """
        claims = self.run(self.asynchronous.claim(max_episodes, episode_type, wait_s, pool=pool))
        return [ClaimedEpisode(**claim, client=self, heartbeat=heartbeat) for claim in claims]

    register_episode = _blocking(AsyncTinkerScriptClient.register_episode)
    register_episodes = _blocking(AsyncTinkerScriptClient.register_episodes)
    reward_call = _blocking(AsyncTinkerScriptClient.reward_call)
    end_episode = _blocking(AsyncTinkerScriptClient.end_episode)
    abort_episode = _blocking(AsyncTinkerScriptClient.abort_episode)
    can_continue_episode = _blocking(AsyncTinkerScriptClient.can_continue_episode)
    heartbeat_episode = _blocking(AsyncTinkerScriptClient.heartbeat_episode)
    get_engine_status = _blocking(AsyncTinkerScriptClient.get_engine_status)
    get_batch_progress = _blocking(AsyncTinkerScriptClient.get_batch_progress)
    await_run_end = _blocking(AsyncTinkerScriptClient.await_run_end)
    is_episode_claimed = _blocking(AsyncTinkerScriptClient.is_episode_claimed)
    replay_latest_llm_call = _blocking(AsyncTinkerScriptClient.replay_latest_llm_call)
    sync_train_config = _blocking(AsyncTinkerScriptClient.sync_train_config)
    start_engine = _blocking(AsyncTinkerScriptClient.start_engine)
    stop_engine = _blocking(AsyncTinkerScriptClient.stop_engine)
    failed_episodes = _blocking(AsyncTinkerScriptClient.failed_episodes)
    retry_failed_episodes = _blocking(AsyncTinkerScriptClient.retry_failed_episodes)
    drop_failed_episodes = _blocking(AsyncTinkerScriptClient.drop_failed_episodes)

    def close(self) -> None:
        """Close the connections. Pending calls raise ClientClosedError."""
        with self._lock:
            loop, thread, self._is_closed = self._loop, self._thread, True
            self._loop = self._thread = None
        if loop is None or thread is None or self._process != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self._end_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    async def _end_tasks(self) -> None:
        await self.asynchronous.close()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            _, late = await asyncio.wait(others, timeout=CLOSE_GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def __enter__(self) -> TinkerScriptClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def held(self, episode: Episode, *, heartbeat: bool) -> Generator[None]:
        """Renew the claim while this block runs, and give the episode back unless the block ends it."""
        try:
            with self._renewing(episode) if heartbeat else nullcontext():
                yield
        except BaseException as error:
            self.run(self.asynchronous.finish_block(episode, error))
            raise
        self.run(self.asynchronous.finish_block(episode))

    @contextmanager
    def _renewing(self, episode: Episode) -> Generator[None]:
        renewing = asyncio.run_coroutine_threadsafe(self._renew(episode), self._running())
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self, episode: Episode) -> None:
        heartbeats = Heartbeats(self.asynchronous.heartbeat_episode)
        with heartbeats.holding(episode):
            await heartbeats.run()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the client's event loop. An interrupt cancels it."""
        try:
            loop = self._running()
        except ClientClosedError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise ClientClosedError(CLOSED)
            if self._loop is None or self._process != os.getpid():
                if self._process:  # After a fork, both still belong to the parent.
                    self.asynchronous.reopen()
                self._process, self._loop = os.getpid(), asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)
                self._thread.start()
            return self._loop


@dataclass(frozen=True, kw_only=True)
class ClaimedEpisode(Episode):
    """An episode to use in a `with` block; see `begin_episode`."""

    client: TinkerScriptClient = field(repr=False, compare=False)
    heartbeat: bool = field(default=True, repr=False, compare=False)

    def reward(self, call: str, reward: float) -> None:
        self.client.reward_call(self, call, reward)

    _block: ExitStack = field(default_factory=ExitStack, init=False, repr=False, compare=False)

    def __enter__(self) -> ClaimedEpisode:
        self._block.enter_context(self.client.held(self, heartbeat=self.heartbeat))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, trace)
