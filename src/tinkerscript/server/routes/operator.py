"""The endpoints of an operator: what is unfinished, what failed, and the engine's status by hand.

Invariant: all of them need the admin's token, and no reply holds a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.params import Depends

from tinkerscript.errors import ConflictError, InterchangeError
from tinkerscript.protocol import (
    EpisodeStatus,
    FailedEpisodesReply,
    FailedEpisodesRequest,
    FailedEpisodesResponse,
    GetEpisodeBufferRequest,
    GetEpisodeBufferResponse,
    SuccessResponse,
    UpdateEngineStatusRequest,
)
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import Interchange
from tinkerscript.trainer_link.server_end import ServerLink


class OperatorEndpoints:
    """The endpoints over one interchange."""

    def __init__(self, *, interchange: Interchange, book: EpisodeBook, link: ServerLink) -> None:
        self._interchange = interchange
        self._book = book
        self._link = link

    def router(self, dependencies: list[Depends]) -> APIRouter:
        """All routes, each behind `dependencies`."""
        router = APIRouter(dependencies=dependencies)
        router.post("/update_engine_status")(self.update_engine_status)
        router.post("/get_episode_buffer")(self.get_episode_buffer)
        router.get("/failed_episodes")(self.failed_episodes)
        router.post("/failed_episodes/retry")(self.retry_failed_episodes)
        router.post("/failed_episodes/drop")(self.drop_failed_episodes)
        return router

    async def update_engine_status(self, body: UpdateEngineStatusRequest) -> SuccessResponse:
        """Set the engine's status by hand, while no trainer is connected to report its own."""
        if self._link.connected:
            raise ConflictError("a trainer is connected and reports the engine's status itself")
        self._interchange.set_status(body.engine_status)
        return SuccessResponse(success=True)

    async def get_episode_buffer(
        self, body: GetEpisodeBufferRequest | None = None
    ) -> GetEpisodeBufferResponse:
        """The episodes that are not over and acknowledged, a page at a time."""
        body = body or GetEpisodeBufferRequest()
        episodes = self._book.unfinished(after=body.after, limit=body.limit + 1)
        return GetEpisodeBufferResponse(
            buffer=[self._status(episode) for episode in episodes[: body.limit]],
            next=_next(episodes, body.limit),
        )

    async def failed_episodes(
        self,
        limit: Annotated[int, Query(ge=1, le=10_000, description="Episodes in one reply at most.")] = 1000,
        after: Annotated[
            int, Query(ge=0, description="Go on after this number: `next` of the page before.")
        ] = 0,
    ) -> FailedEpisodesResponse:
        """The dead letters, with the reason of every attempt, a page at a time."""
        episodes = self._book.dead_letters.page(after=after, limit=limit + 1)
        return FailedEpisodesResponse(
            episodes=[self._status(episode) for episode in episodes[:limit]], next=_next(episodes, limit)
        )

    async def retry_failed_episodes(self, body: FailedEpisodesRequest) -> FailedEpisodesReply:
        """Register failed episodes again, with a fresh budget of attempts.

        Refused for a failure that the trainer was told of: its group may be closed already.
        """
        return await self._each(body.episode_uuids, self._interchange.retry)

    async def drop_failed_episodes(self, body: FailedEpisodesRequest) -> FailedEpisodesReply:
        """Take failed episodes off the list. Refused while the trainer still waits for their failure."""
        return await self._each(body.episode_uuids, self._interchange.drop)

    async def _each(self, uuids: list[str], action: Callable[[str], None]) -> FailedEpisodesReply:
        done, refused = list[str](), dict[str, str]()
        for uuid in uuids:
            try:
                action(uuid)
            except InterchangeError as error:
                refused[uuid] = str(error)
            else:
                done.append(uuid)
        await self._interchange.durable()
        return FailedEpisodesReply(success=not refused, done=done, refused=refused)

    def _status(self, episode: EpisodeRecord) -> EpisodeStatus:
        return EpisodeStatus(
            episode_uuid=episode.uuid,
            client_uuid=episode.client_uuid,
            episode_status=episode.state,
            latest_activity_timestamp=self._book.last_activity(episode),
            attempt=episode.attempt,
            episode_type=episode.episode_type,
            pool=episode.pool,
            group_id=episode.group_id,
            policy_version=episode.policy_version if episode.attempt else None,
            failures=episode.failures,
            acknowledged=episode.acknowledged,
        )


def _next(episodes: list[EpisodeRecord], limit: int) -> int | None:
    """`after` of the next page, if there are more than `limit`."""
    return episodes[limit - 1].sequence if len(episodes) > limit else None
