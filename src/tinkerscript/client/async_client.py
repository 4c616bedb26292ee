"""`AsyncTinkerScriptClient` is the client for asyncio programs; `sync_client.py` wraps it for all others.

Any operation may be cancelled at any time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, TypeVar

import httpx
from pydantic import JsonValue

from tinkerscript.client.episode import CLOSED, LAST, Episode, episode_fields, renewed_by_task
from tinkerscript.client.exchange import HttpRequest, Operation, Reply, Response, Wait
from tinkerscript.client.operations import NO_RESULT, Operations
from tinkerscript.client.settings import (
    DEFAULT_SERVER_URL,
    DEFAULT_TIMEOUT_S,
    ClientSettings,
    make_settings,
    settings_from_env,
)
from tinkerscript.errors import ClientClosedError, ClientError
from tinkerscript.protocol import (
    DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
    TRAINER_POOL,
    BatchProgressResponse,
    CanContinueEpisodeResponse,
    ClaimType,
    EngineStatusResponse,
    EpisodeStatus,
    EpisodeType,
    FailedEpisodesReply,
    ReplayLatestCallResponse,
    WorkflowOutput,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncTinkerScriptClient:
    """Claims episodes from an interchange server and hands in their results.

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
        """Create a client without sending anything. Raises ValueError for a bad URL or token file.

        Args:
            server_url: URL of the interchange server, such as `http://10.0.0.5:10086`.
            client_uuid: Name of this client at the server; a new uuid if None.
            token: Token of the client role, "" for none; by default TINKERSCRIPT_CLIENT_TOKEN, or the file in
                TINKERSCRIPT_CLIENT_TOKEN_FILE.
            timeout_s: Seconds to retry operations during an outage. None: no limit.
            allow_discard_timeout: Seconds without activity after which a claim's lease expires.
            ca_file: PEM file with certificates to verify an https:// server; by default TINKERSCRIPT_CA_FILE.
        """
        self._lock = threading.RLock()
        self._closing = asyncio.Event()
        self._http: httpx.AsyncClient | None = None
        self._settings: ClientSettings | None = make_settings(
            server_url, client_uuid, token, timeout_s, allow_discard_timeout, ca_file
        )

    @classmethod
    def from_env(cls) -> AsyncTinkerScriptClient:
        """Create a client for the server in TINKERSCRIPT_SERVER_URL, with TINKERSCRIPT_CLIENT_TOKEN.

        First use reads the environment, and raises ValueError for a bad URL or token file.
        """
        client = cls(DEFAULT_SERVER_URL, token="")
        client._settings = None
        return client

    @property
    def settings(self) -> ClientSettings:
        with self._lock:
            if self._settings is None:
                self._settings = settings_from_env()
            return self._settings

    def with_timeout(self, timeout_s: float | None) -> AsyncTinkerScriptClient:
        """Return a copy with its own connections and this `timeout_s`."""
        given = self.settings
        return AsyncTinkerScriptClient(
            given.server_url,
            client_uuid=given.client_uuid,
            token=given.token,
            timeout_s=timeout_s,
            allow_discard_timeout=given.allow_discard_timeout,
            ca_file=given.ca_file,
        )

    @property
    def pool(self) -> str:
        """The pool that `register_episode` fills."""
        return self.settings.pool

    async def begin_episode(
        self,
        episode_type: ClaimType = "any",
        wait_s: float | None = None,
        *,
        pool: str = TRAINER_POOL,
        heartbeat: bool = True,
    ) -> AsyncClaimedEpisode:
        """Claim an episode, waiting up to `wait_s` seconds for one (None: no limit).

        `pool` selects the trainer's episodes or a client's own (`client.pool`). An `async with` block gives
        the episode back if it raises, and with `heartbeat` renews the claim meanwhile (see `Episode.lost`).
        Raises NoEpisodeError, RunFinishedError, ServerUnreachableError or RequestRefusedError.
        """
        (episode,) = await self.begin_episodes(1, episode_type, wait_s, pool=pool, heartbeat=heartbeat)
        return episode

    async def begin_episodes(
        self,
        max_episodes: int,
        episode_type: ClaimType = "any",
        wait_s: float | None = None,
        *,
        pool: str = TRAINER_POOL,
        heartbeat: bool = True,
    ) -> list[AsyncClaimedEpisode]:
        """Claim up to `max_episodes` (at most 256) with one request.

        Waits and raises like `begin_episode`.
        """
        claims = await self.claim(max_episodes, episode_type, wait_s, pool=pool)
        return [AsyncClaimedEpisode(**claim, client=self, heartbeat=heartbeat) for claim in claims]

    async def claim(
        self, max_episodes: int, episode_type: ClaimType, wait_s: float | None, *, pool: str
    ) -> list[dict[str, Any]]:
        claiming = self._operations.begin_episodes(max_episodes, episode_type, wait_s, pool=pool)
        return [episode_fields(claim, self.settings) for claim in await self._run(claiming)]

    async def register_episode(
        self,
        payload: Mapping[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType = "train",
        round: str = "",
    ) -> list[str]:
        """Register a group of `group_size` episodes with this `payload` in the client's own `pool`.

        The returned uuids depend on the pool, `task_id` (the sample's name) and `round`: registering a group
        again adds nothing, even from a later process; another `round` makes another pass. Waits while the
        pool's quota is used up. Raises ValueError, RequestRefusedError (409 if the payload differs),
        ServerUnreachableError.
        """
        return await self._run(
            self._operations.register_episode(
                payload, task_id=task_id, group_size=group_size, episode_type=episode_type, round=round
            )
        )

    async def register_episodes(
        self,
        samples: Mapping[str, Mapping[str, JsonValue]],
        *,
        group_size: int,
        episode_type: EpisodeType = "train",
        round: str = "",
    ) -> dict[str, list[str]]:
        """Register a group per sample (task id -> payload) with few requests. Returns uuids by task id.

        Waits and raises like `register_episode`.
        """
        return await self._run(
            self._operations.register_episodes(
                samples, group_size=group_size, episode_type=episode_type, round=round
            )
        )

    async def reward_call(self, episode: Episode, call: str, reward: float) -> None:
        """Reward one model call; see `Episode.reward`."""
        if call == LAST:
            call = (await self.replay_latest_llm_call(episode)).call_id
        Episode.reward(episode, call, reward)

    async def end_episode(
        self,
        episode: Episode,
        reward: float | list[float] | WorkflowOutput | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        is_success: bool | None = None,
        metadata: dict[str, JsonValue] | None = None,
        log_metrics: dict[str, float] | None = None,
        role_rewards: dict[str, float] | None = None,
    ) -> None:
        """Hand in the episode's result and return once it is stored. Safe to repeat.

        `rewards` are for single model calls by the `id` of the reply, added to those given to
        `Episode.reward`. The episode's reward is their sum plus `reward`, then optional. Raises
        ClaimLostError, ServerUnreachableError, RequestRefusedError, and ValueError for a reward that is
        missing or above 1e6 in magnitude.
        """
        await self._run(
            self._operations.end_episode(
                episode,
                reward,
                rewards=rewards,
                is_success=is_success,
                metadata=metadata,
                log_metrics=log_metrics,
                role_rewards=role_rewards,
            )
        )

    async def abort_episode(self, episode: Episode, reason: str, kind: str = "aborted") -> None:
        """Give the episode back because this attempt failed for `reason`. `kind` is a stable identifier.

        Raises ClaimLostError, ServerUnreachableError or RequestRefusedError.
        """
        await self._run(self._operations.abort_episode(episode, reason, kind))

    async def can_continue_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """Renew the claim; return whether it still counts, and why not."""
        return await self._run(self._operations.can_continue_episode(episode))

    async def heartbeat_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """Renew the claim during a long computation without model calls.

        A Runner and an episode's block do this automatically.
        """
        return await self._run(self._operations.heartbeat_episode(episode))

    async def get_engine_status(self) -> EngineStatusResponse:
        """Return the engine's state, the policy version, and episode counts by state."""
        return await self._run(self._operations.get_engine_status())

    async def get_batch_progress(self) -> BatchProgressResponse:
        """Return what the trainer waits for before its next step, and which pools run ahead of it."""
        return await self._run(self._operations.get_batch_progress())

    async def await_run_end(self, wait_s: float | None = None) -> bool:
        """Wait up to `wait_s` seconds (None: no limit) for the run to finish; return whether it has.

        Use it while one episode takes long; `begin_episode` notices the end by itself. Raises RunFailedError,
        RequestRefusedError (404 from a server that is too old) or ServerUnreachableError.
        """
        return await self._run(self._operations.await_run_end(wait_s))

    async def is_episode_claimed(self, episode_uuid: str) -> bool:
        """Return whether a client holds the episode now."""
        return await self._run(self._operations.is_episode_claimed(episode_uuid))

    async def replay_latest_llm_call(self, episode: Episode) -> ReplayLatestCallResponse:
        """Return the claim's latest recorded model call: messages, ids and the reply.

        Raises RequestRefusedError (404) before the first call.
        """
        return await self._run(self._operations.replay_latest_llm_call(episode))

    # These need the admin's token.

    async def sync_train_config(self, yaml_as_string: str) -> None:
        """Store a training config for `start_engine`. Raises RequestRefusedError, which names a bad key."""
        await self._run(self._operations.sync_train_config(yaml_as_string))

    async def start_engine(self, *, force_restart: bool = False) -> None:
        """Start a trainer; with `force_restart`, stop the current one first.

        `get_engine_status` reports when it is ready, or why it failed. Raises RequestRefusedError.
        """
        await self._run(self._operations.start_engine(force_restart=force_restart))

    async def stop_engine(self) -> None:
        """Ask the trainer to end its run. Raises RequestRefusedError if there is no trainer."""
        await self._run(self._operations.stop_engine())

    async def failed_episodes(self) -> list[EpisodeStatus]:
        """Return the dead letters: episodes that used up their attempts, with the reasons."""
        return await self._run(self._operations.failed_episodes())

    async def retry_failed_episodes(self, episode_uuids: Sequence[str]) -> FailedEpisodesReply:
        """Give failed episodes new attempts, unless a trainer may have used their failures already."""
        return await self._run(self._operations.each_failed_episode("retry", episode_uuids))

    async def drop_failed_episodes(self, episode_uuids: Sequence[str]) -> FailedEpisodesReply:
        """Remove failed episodes from the list."""
        return await self._run(self._operations.each_failed_episode("drop", episode_uuids))

    async def close(self) -> None:
        """Close the connections. Pending calls raise ClientClosedError."""
        self._closing.set()
        if self._http is not None:
            await self._http.aclose()

    def reopen(self) -> None:
        """After a fork, connections and event loop belong to the parent."""
        self._http, self._closing = None, asyncio.Event()

    async def __aenter__(self) -> AsyncTinkerScriptClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def held(self, episode: Episode, *, heartbeat: bool) -> AsyncGenerator[None]:
        """Renew the claim while this block runs, and give the episode back unless the block ends it."""
        try:
            if heartbeat:
                async with renewed_by_task(episode, self.heartbeat_episode):
                    yield
            else:
                yield
        except BaseException as error:
            await self.finish_block(episode, error)
            raise
        await self.finish_block(episode)

    async def finish_block(self, episode: Episode, error: BaseException | None = None) -> None:
        """Give the episode back unless its block ended it."""
        if episode.lease.is_over:
            return
        if error is None:
            logger.warning("episode %s is given back: its block ended without a result", episode.episode_uuid)
            abort = self._operations.abort_episode(episode, NO_RESULT, "no_result")
        else:
            abort = self._operations.give_back(episode, error)
        try:
            await self._run(abort)
        except ClientError as problem:  # Let the caller see the block's error; the lease covers an outage.
            logger.warning("episode %s could not be given back: %s", episode.episode_uuid, problem)

    @property
    def _operations(self) -> Operations:
        return Operations(self.settings)

    @property
    def _connections(self) -> httpx.AsyncClient:
        with self._lock:
            if self._http is None:
                self._http = httpx.AsyncClient(**self.settings.connections())
            return self._http

    async def _run(self, operation: Operation[T]) -> T:
        with closing(operation):
            reply: Reply = None
            while True:
                try:
                    step = operation.send(reply)
                except StopIteration as done:
                    return done.value
                if isinstance(step, Wait):
                    await self._pause(step.delay_s)
                    reply = None
                else:
                    reply = await self.send(step)

    async def _pause(self, delay_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._closing.wait()
                raise ClientClosedError(CLOSED)

    async def send(self, request: HttpRequest) -> Reply:
        if self._closing.is_set():
            raise ClientClosedError(CLOSED)
        try:
            response = await self._connections.request(
                request.method,
                request.path,
                content=request.body,
                headers=request.headers,
                timeout=request.timeout_s,
            )
        except (httpx.TransportError, RuntimeError) as error:  # httpx raises RuntimeError once closed.
            if self._closing.is_set():
                raise ClientClosedError(CLOSED) from error
            if isinstance(error, RuntimeError):
                raise
            return error
        return Response(response.status_code, response.headers, response.content)


@dataclass(frozen=True, kw_only=True)
class AsyncClaimedEpisode(Episode):
    """An episode to use in an `async with` block; see `begin_episode`."""

    client: AsyncTinkerScriptClient = field(repr=False, compare=False)
    heartbeat: bool = field(default=True, repr=False, compare=False)

    async def reward(self, call: str, reward: float) -> None:
        await self.client.reward_call(self, call, reward)

    def on_thread(self, loop: asyncio.AbstractEventLoop) -> Episode:
        given = {each.name: getattr(self, each.name) for each in fields(Episode)}
        return _OnThread(**given, whole=self, loop=loop)

    _block: AsyncExitStack = field(default_factory=AsyncExitStack, init=False, repr=False, compare=False)

    async def __aenter__(self) -> AsyncClaimedEpisode:
        await self._block.enter_async_context(self.client.held(self, heartbeat=self.heartbeat))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._block.__aexit__(kind, error, trace)


@dataclass(frozen=True, kw_only=True)
class _OnThread(Episode):
    whole: AsyncClaimedEpisode = field(repr=False, compare=False)
    loop: asyncio.AbstractEventLoop = field(repr=False, compare=False)

    def reward(self, call: str, reward: float) -> None:
        asyncio.run_coroutine_threadsafe(self.whole.reward(call, reward), self.loop).result()
