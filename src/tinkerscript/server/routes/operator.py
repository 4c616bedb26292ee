"""Operator endpoints: the fleet, unfinished and failed episodes, and the engine's status, set manually.

Invariant: all of them need the admin role, and no reply contains a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Response

from tinkerscript.errors import ConflictError, InterchangeError
from tinkerscript.protocol import (
    EpisodeStatus,
    FailedEpisodesReply,
    FailedEpisodesRequest,
    FailedEpisodesResponse,
    FleetResponse,
    GetEpisodeBufferRequest,
    GetEpisodeBufferResponse,
    SuccessResponse,
    UpdateEngineStatusRequest,
)
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.routes.fleet import fleet_response
from tinkerscript.trainer_link.server_end import ServerLink


class OperatorRoutes:
    """The routes of an operator."""

    def __init__(self, *, interchange: Interchange, link: ServerLink) -> None:
        self._interchange = interchange
        self._book = interchange.book
        self._link = link

    def router(self) -> APIRouter:
        """All routes; they need the admin role."""
        router = APIRouter(tags=["operator"])
        router.get("/fleet", response_model=FleetResponse)(self.fleet)
        router.post("/update_engine_status")(self.update_engine_status)
        router.post("/get_episode_buffer")(self.get_episode_buffer)
        router.get("/failed_episodes")(self.failed_episodes)
        router.post("/failed_episodes/retry")(self.retry_failed_episodes)
        router.post("/failed_episodes/drop")(self.drop_failed_episodes)
        return router

    async def fleet(self) -> Response:
        """The engine, the batch, the claims, the clients and the failures, as they are now."""
        # Not the model itself: FastAPI would check the reply once more, at twice the cost.
        found = fleet_response(self._interchange, self._link)
        return Response(found.model_dump_json(), media_type="application/json")

    async def update_engine_status(self, body: UpdateEngineStatusRequest) -> SuccessResponse:
        """Set the engine's status by hand, while no trainer is connected."""
        if self._link.connected:
            raise ConflictError("a trainer is connected and reports the engine's status itself")
        self._interchange.set_status(body.engine_status)
        return SuccessResponse(success=True)

    async def get_episode_buffer(
        self, body: GetEpisodeBufferRequest | None = None
    ) -> GetEpisodeBufferResponse:
        """The episodes whose outcome the trainer has not acknowledged, page by page."""
        body = body or GetEpisodeBufferRequest()
        episodes = self._book.unfinished(after=body.after, limit=body.limit + 1)
        return GetEpisodeBufferResponse(
            buffer=[self._status(episode) for episode in episodes[: body.limit]],
            next=_next(episodes, body.limit),
        )

    async def failed_episodes(
        self,
        limit: Annotated[
            int, Query(ge=1, le=10_000, description="Maximum number of episodes in the reply.")
        ] = 1000,
        after: Annotated[
            int, Query(ge=0, description="Continue after this number: `next` of the previous page.")
        ] = 0,
    ) -> FailedEpisodesResponse:
        """The failed episodes, with the failure of every attempt, page by page."""
        episodes = self._book.failed(after=after, limit=limit + 1)
        return FailedEpisodesResponse(
            episodes=[self._status(episode) for episode in episodes[:limit]], next=_next(episodes, limit)
        )

    async def retry_failed_episodes(self, body: FailedEpisodesRequest) -> FailedEpisodesReply:
        """Requeue failed episodes with a fresh attempt budget.

        Refused for a failure that was sent to the trainer: its group may be closed already.
        """
        return await self._each(body.episode_uuids, self._book.retry)

    async def drop_failed_episodes(self, body: FailedEpisodesRequest) -> FailedEpisodesReply:
        """Take failed episodes off the list. Refused while the trainer still waits for the failure."""
        return await self._each(body.episode_uuids, self._book.drop)

    async def _each(self, uuids: list[str], action: Callable[[str], object]) -> FailedEpisodesReply:
        done, refused = list[str](), dict[str, str]()
        for uuid in uuids:
            try:
                action(uuid)
            except InterchangeError as error:
                refused[uuid] = str(error)
            else:
                done.append(uuid)
        await self._interchange.commit()
        return FailedEpisodesReply(success=not refused, done=done, refused=refused)

    def _status(self, episode: EpisodeRecord) -> EpisodeStatus:
        return EpisodeStatus(
            episode_uuid=episode.uuid,
            client_uuid=episode.client_uuid,
            episode_status=episode.state,
            latest_activity_timestamp=self._book.leases.last_activity(episode),
            allow_discard_timeout=episode.lease_s,
            discard_episode_timeout=episode.lease_s,
            attempt=episode.attempt,
            episode_type=episode.episode_type,
            pool=episode.pool,
            group_id=episode.group_id,
            policy_version=episode.policy_version if episode.attempt else None,
            failures=episode.failures,
            acknowledged=episode.acknowledged,
        )


def _next(episodes: list[EpisodeRecord], limit: int) -> int | None:
    """`after` for the next page; None if this is the last one."""
    return episodes[limit - 1].sequence if len(episodes) > limit else None
