"""`AsyncTinkerScriptClient`: the client for asyncio programs. An operation may be cancelled at any time."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import JsonValue

from tinkerscript.client.core import (
    DEFAULT_TIMEOUT_S,
    ClientCore,
    ClientSettings,
    Episode,
    episode_fields,
    failure_line,
    make_settings,
    workflow_output,
)
from tinkerscript.client.exchange import Exchange, Wait
from tinkerscript.errors import ClaimLostError, ClientError
from tinkerscript.protocol import (
    DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
    TRAINER_POOL,
    CanContinueEpisodeResponse,
    ClaimType,
    EngineStatusResponse,
    EpisodeType,
    WorkflowOutput,
)

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT")


class AsyncTinkerScriptClient:
    """Claims episodes from an interchange server and hands in their results.

    Requests are repeated while the server is away or busy; `timeout_s` says for how long.
    """

    def __init__(
        self,
        server_url: str,
        *,
        client_uuid: str | None = None,
        token: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        allow_discard_timeout: float = DEFAULT_ALLOW_DISCARD_TIMEOUT_S,
    ) -> None:
        """Nothing is sent yet.

        `timeout_s` are the seconds that an operation goes on while the server cannot be reached (None:
        for ever); `allow_discard_timeout` the seconds without activity after which a claim lapses.
        """
        self.settings: ClientSettings = make_settings(
            server_url, client_uuid, token, timeout_s, allow_discard_timeout
        )
        self._core = ClientCore(self.settings)
        self._http = httpx.AsyncClient(
            base_url=self.settings.server_url,
            headers=self.settings.headers(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    @property
    def pool(self) -> str:
        """The pool of the episodes that this client registers."""
        return self.settings.client_uuid

    async def begin_episode(
        self, episode_type: ClaimType = "any", wait_s: float | None = None, *, pool: str = TRAINER_POOL
    ) -> AsyncClaimedEpisode:
        """Claim an episode; wait for one as long as `wait_s` seconds say (None: for ever).

        `pool`: whose episodes, the trainer's or the `pool` of the client that registered them. As an async
        context manager the episode renews its claim while its block runs, and is given back with the reason
        when its block raises. Raises NoEpisodeError, ServerUnreachableError or RequestRefusedError.
        """
        reply = await self._run(self._core.begin_episode(episode_type, wait_s, pool=pool))
        return AsyncClaimedEpisode(**episode_fields(reply, self.settings), client=self)

    async def begin_episodes(
        self,
        max_episodes: int,
        episode_type: ClaimType = "any",
        wait_s: float | None = None,
        *,
        pool: str = TRAINER_POOL,
    ) -> list[AsyncClaimedEpisode]:
        """Claim up to `max_episodes` (1 to 256) with one request; waits until there is at least one.

        Raises NoEpisodeError, ServerUnreachableError or RequestRefusedError.
        """
        exchange = self._core.begin_episode(episode_type, wait_s, max_episodes=max_episodes, pool=pool)
        reply = await self._run(exchange)
        claims = [reply, *reply.more]
        return [AsyncClaimedEpisode(**episode_fields(claim, self.settings), client=self) for claim in claims]

    async def register_episode(
        self,
        payload: dict[str, JsonValue],
        *,
        task_id: str,
        group_size: int = 1,
        episode_type: EpisodeType = "train",
        trial: int = 0,
    ) -> list[str]:
        """Register a sample of your own, as `group_size` episodes in this client's pool; returns their uuids.

        The episodes of one `task_id` are compared with each other; `trial` tells a later group of the same
        task from this one. Safe to repeat under the same `client_uuid`: nothing is registered twice.
        Raises ValueError, ServerUnreachableError or RequestRefusedError.
        """
        exchanges = self._core.register_episodes(
            payload, task_id=task_id, group_size=group_size, episode_type=episode_type, trial=trial
        )
        for exchange in exchanges.values():
            await self._run(exchange)
        return list(exchanges)

    async def end_episode(
        self,
        episode: Episode,
        reward: float | list[float] | WorkflowOutput,
        *,
        is_success: bool | None = None,
        metadata: dict[str, JsonValue] | None = None,
        log_metrics: dict[str, float] | None = None,
    ) -> None:
        """Hand in the episode's result, and return once it is stored. Safe to repeat.

        Raises ClaimLostError when the result does not count any more, ValueError for a reward that is
        missing or not finite, ServerUnreachableError or RequestRefusedError.
        """
        output = workflow_output(reward, is_success=is_success, metadata=metadata, log_metrics=log_metrics)
        await self._run(self._core.end_episode(episode, output))

    async def abort_episode(self, episode: Episode, reason: str, kind: str = "aborted") -> None:
        """Give the episode back: this attempt failed for `reason`. `kind` is a stable word.

        Raises ClaimLostError, ServerUnreachableError or RequestRefusedError.
        """
        await self._run(self._core.abort_episode(episode, reason, kind))

    async def can_continue_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """Whether the episode still counts, and why not. Renews the claim."""
        return await self._run(self._core.can_continue_episode(episode))

    async def heartbeat_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """Renew the claim while a program computes for long without a model call. Says if it still counts."""
        return await self._run(self._core.heartbeat_episode(episode))

    async def renew_until_lost(self, episode: Episode) -> str:
        """Renew the claim until it is lost: sets `episode.lost` and returns the reason. Cancel it to stop."""
        while True:
            await asyncio.sleep(episode.heartbeat_s)
            try:
                reply = await self.heartbeat_episode(episode)
            except ClientError as error:
                logger.warning("episode %s: no heartbeat: %s", episode.episode_uuid, error)
                continue
            if not reply.can_continue:
                episode.lost.set()
                return reply.reason

    async def get_engine_status(self) -> EngineStatusResponse:
        """What the engine does, the policy version, and how many episodes are in each state."""
        return await self._run(self._core.get_engine_status())

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncTinkerScriptClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, exchange: Exchange[ReplyT]) -> ReplyT:
        while True:
            request = exchange.request
            try:
                response = await self._http.request(
                    request.method, request.path, content=request.body, timeout=request.timeout_s
                )
            except httpx.TransportError as error:
                step = exchange.unreachable(error)
            else:
                step = exchange.answered(response.status_code, response.headers, response.content)
            if not isinstance(step, Wait):
                return step.value
            await asyncio.sleep(step.delay_s)


@dataclass(frozen=True, kw_only=True)
class AsyncClaimedEpisode(Episode):
    """Renews its claim while its `async with` block runs; gives itself back with the reason if it raises."""

    client: AsyncTinkerScriptClient = field(repr=False, compare=False)
    _heartbeats: list[asyncio.Task[str]] = field(
        default_factory=list[asyncio.Task[str]], init=False, repr=False, compare=False
    )

    async def __aenter__(self) -> AsyncClaimedEpisode:
        self._heartbeats.append(asyncio.create_task(self.client.renew_until_lost(self)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for heartbeat in self._heartbeats:
            heartbeat.cancel()
        await asyncio.gather(*self._heartbeats, return_exceptions=True)
        if error is None or isinstance(error, ClaimLostError):
            return
        try:
            await self.client.abort_episode(self, failure_line(error), "task_error")
        except ClaimLostError as lost:
            logger.warning("episode %s was lost before it was given back: %s", self.episode_uuid, lost)
