"""`AsyncTinkerScriptClient`: the client for asyncio programs. An operation may be cancelled at any time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import JsonValue

from tinkerscript.client.episode import Episode, episode_fields
from tinkerscript.client.exchange import Done, Exchange, Wait
from tinkerscript.client.operations import TASK_ERROR, ClientCore, failure_line, noted, workflow_output
from tinkerscript.client.renewal import Renewals
from tinkerscript.client.settings import DEFAULT_TIMEOUT_S, LAST_WORDS_S, ClientSettings, make_settings
from tinkerscript.errors import ClientError
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
            verify=self.settings.tls(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
        )

    @property
    def pool(self) -> str:
        """The pool that `register_episode` fills; its name is the `client_uuid`."""
        return self.settings.pool

    async def begin_episode(
        self,
        episode_type: ClaimType = "any",
        wait_s: float | None = None,
        *,
        pool: str = TRAINER_POOL,
        heartbeat: bool = True,
    ) -> AsyncClaimedEpisode:
        """Claim an episode; wait for one as long as `wait_s` seconds say (None: for ever).

        `pool` names whose episodes: the trainer's, or a client's own (`client.pool`). As an asynchronous
        context manager the episode is given back with the reason when its block raises and, with
        `heartbeat`, its claim is renewed while the block runs.
        Raises NoEpisodeError, ServerUnreachableError or RequestRefusedError.
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
        """Claim up to `max_episodes` (1 to 256) with one request; waits until there is at least one.

        Raises NoEpisodeError, ServerUnreachableError or RequestRefusedError.
        """
        exchange = self._core.begin_episode(episode_type, wait_s, max_episodes=max_episodes, pool=pool)
        reply = await self._run(exchange)
        return [
            AsyncClaimedEpisode(
                **episode_fields(claim, self.settings.client_uuid, self.settings.allow_discard_timeout),
                client=self,
                heartbeat=heartbeat,
            )
            for claim in (reply, *reply.more)
        ]

    async def register_episode(
        self,
        payload: Mapping[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType = "train",
        round: str = "",
    ) -> list[str]:
        """Register one group of `group_size` episodes of `payload` into this client's own `pool`.

        `task_id` names the sample. The uuids, which are returned, follow from the pool, `task_id` and
        `round`, so that a repetition registers nothing twice, also by a later process with the same
        `client_uuid`; another pass over the samples names another `round`. While the server's quota for
        the pool is used up this waits.
        Raises ValueError, RequestRefusedError (409: the same task and round with another payload),
        ServerUnreachableError.
        """
        exchange = self._core.register_episode(
            payload, task_id=task_id, group_size=group_size, episode_type=episode_type, round=round
        )
        return await self._run(exchange)

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
        with episode.lease.settling():
            await self._run(self._core.end_episode(episode, output))

    async def abort_episode(self, episode: Episode, reason: str, kind: str = "aborted") -> None:
        """Give the episode back: this attempt failed for `reason`. `kind` is a stable word.

        Raises ClaimLostError, ServerUnreachableError or RequestRefusedError.
        """
        with episode.lease.settling():
            await self._run(self._core.abort_episode(episode, reason, kind))

    async def can_continue_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """Whether the episode still counts, and why not. Renews the claim."""
        return noted(episode, await self._run(self._core.can_continue_episode(episode)))

    async def heartbeat_episode(self, episode: Episode) -> CanContinueEpisodeResponse:
        """Renew the claim: for a computation that makes no model calls for a while.

        A Runner does so by itself, and so does a `with` block. The answer is `can_continue_episode`'s.
        """
        return noted(episode, await self._run(self._core.heartbeat_episode(episode)))

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
            step = await self._send(exchange)
            if not isinstance(step, Wait):
                return step.value
            await asyncio.sleep(step.delay_s)

    async def _send(self, exchange: Exchange[ReplyT]) -> Done[ReplyT] | Wait:
        request = exchange.request
        try:
            response = await self._http.request(
                request.method, request.path, content=request.body, timeout=request.timeout_s
            )
        except httpx.TransportError as error:
            return exchange.unreachable(error)
        return exchange.answered(response.status_code, response.headers, response.content)

    @asynccontextmanager
    async def held(self, episode: Episode, *, heartbeat: bool) -> AsyncGenerator[None]:
        """Renew the claim while this block runs, and give the episode back if the block raises.

        What `async with await client.begin_episode() as episode` does; an `Episode` of elsewhere can be held
        too. A heartbeat that learns that the claim is lost cancels the block, which raises ClaimLostError.
        """
        try:
            if heartbeat:
                async with self._renewed(episode):
                    yield
            else:
                yield
        except BaseException as error:
            await self._give_back(episode, error)
            raise

    @asynccontextmanager
    async def _renewed(self, episode: Episode) -> AsyncGenerator[None]:
        renewals = Renewals(self.heartbeat_episode, self._core.timing)
        renewing = asyncio.create_task(renewals.run())
        try:
            with renewals.holding(episode) as held:
                async with held.cancelling_the_block():
                    yield
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])

    async def _give_back(self, episode: Episode, error: BaseException) -> None:
        """The block's own error is what its caller sees; the lease covers a server that is away."""
        if episode.lease.is_over:
            return
        within_s = None if isinstance(error, Exception) else LAST_WORDS_S
        exchange = self._core.abort_episode(episode, failure_line(error), TASK_ERROR, within_s=within_s)
        try:
            with episode.lease.settling():
                await self._run(exchange)
        except ClientError as problem:
            logger.warning("episode %s could not be given back: %s", episode.episode_uuid, problem)


@dataclass(frozen=True, kw_only=True)
class AsyncClaimedEpisode(Episode):
    """An episode whose `async with` block renews its claim, and gives it back when it raises."""

    client: AsyncTinkerScriptClient = field(repr=False, compare=False)
    heartbeat: bool = field(default=True, repr=False, compare=False)
    """Whether the `async with` block renews the claim."""

    _block: AsyncExitStack = field(default_factory=AsyncExitStack, init=False, repr=False, compare=False)

    async def __aenter__(self) -> AsyncClaimedEpisode:
        await self._block.enter_async_context(self.client.held(self, heartbeat=self.heartbeat))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._block.__aexit__(kind, error, trace)
