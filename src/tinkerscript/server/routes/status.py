"""Endpoints that show the state, and an operator's.

`/health` and `/ready` are open. If tokens are set, an operator's endpoints require the admin's, and the
others a client's or the claim's key. Replies about the fleet cost time per client, not per episode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import from_json

from tinkerscript import __version__
from tinkerscript.access_tokens import ClaimId, ClaimKeys, Roles, authorization_of
from tinkerscript.errors import ConflictError, InterchangeError, UnknownEpisodeError
from tinkerscript.protocol import (
    BatchProgressResponse,
    DeadLetter,
    EngineStatusResponse,
    EpisodeStatus,
    FailedEpisodesReply,
    FailedEpisodesRequest,
    FailedEpisodesResponse,
    Failure,
    FleetClaim,
    FleetClient,
    FleetResponse,
    FleetTotals,
    GetEpisodeBufferRequest,
    GetEpisodeBufferResponse,
    HealthResponse,
    IsEpisodeClaimedRequest,
    IsEpisodeClaimedResponse,
    ReadyResponse,
    ReplayLatestCallRequest,
    ReplayLatestCallResponse,
    StopClientRequest,
    SuccessResponse,
    UpdateEngineStatusRequest,
)
from tinkerscript.rollouts.call import Call, calls_of, full_prompts, unpack_ids
from tinkerscript.server.claims import LeasedClaims
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import CONTENT_TYPE, ServerMetrics
from tinkerscript.trainer_link.server_end import ServerLink

MAX_CLAIMS = 500
SHOWN_CLIENTS = 500
MAX_FAILED = 100
MAX_FAILURES = 10

MAX_MESSAGE_CHARS = 2000


class StatusRoutes:
    def __init__(
        self,
        *,
        interchange: Interchange,
        link: ServerLink,
        keys: ClaimKeys,
        claims: LeasedClaims,
        metrics: ServerMetrics,
        roles: Roles,
    ) -> None:
        self._interchange = interchange
        self._book = interchange.book
        self._link = link
        self._keys = keys
        self._claims = claims
        self._metrics = metrics
        self._roles = roles

    def router(self) -> APIRouter:
        router = APIRouter(tags=["interchange"])
        of_client = [Depends(self._require_client)]
        router.get("/get_engine_status", dependencies=of_client)(self.get_engine_status)
        router.get("/get_batch_progress", dependencies=of_client)(self.get_batch_progress)
        router.get("/metrics", response_class=Response, dependencies=of_client)(self.metrics)
        router.get("/openapi.json", include_in_schema=False, dependencies=of_client)(self.openapi)
        router.post("/is_episode_claimed", dependencies=of_client)(self.is_episode_claimed)
        router.post("/replay_latest_llm_call")(self.replay_latest_llm_call)
        router.get("/health")(self.health)
        router.get("/ready")(self.ready)
        return router

    async def _require_client(self, request: Request) -> None:
        self._roles.check("client", request.scope)

    async def openapi(self, request: Request) -> JSONResponse:
        return JSONResponse(request.app.openapi())

    def admin_router(self) -> APIRouter:
        router = APIRouter(tags=["operator"])
        router.get("/fleet", response_model=FleetResponse)(self.fleet)
        router.post("/stop_client")(self.stop_client)
        router.post("/update_engine_status")(self.update_engine_status)
        router.post("/get_episode_buffer")(self.get_episode_buffer)
        router.get("/failed_episodes")(self.failed_episodes)
        router.post("/failed_episodes/retry")(self.retry_failed_episodes)
        router.post("/failed_episodes/drop")(self.drop_failed_episodes)
        return router

    async def get_engine_status(self) -> EngineStatusResponse:
        """The engine's state, and the number of episodes in each state."""
        interchange = self._interchange
        return EngineStatusResponse(
            **_engine_state(interchange, self._link),
            model=interchange.engine.model,
            pools=self._book.counts.by_pool(),
            waiting_clients=interchange.waiting_clients,
            active_clients=self._book.active_clients,
            quarantined=interchange.clients.quarantined(),
        )

    async def health(self) -> HealthResponse:
        """Whether the server is up."""
        return HealthResponse(version=__version__)

    async def ready(self) -> ReadyResponse:
        """Whether this server serves the run's episodes. A standby server answers 503."""
        return ReadyResponse(epoch=self._link.epoch)

    async def metrics(self) -> Response:
        """Counters and gauges for Prometheus."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def get_batch_progress(self) -> BatchProgressResponse:
        """What the trainer waits for before its next step, and which pools are ahead of it."""
        return batch_progress(self._interchange, self._link)

    async def is_episode_claimed(self, body: IsEpisodeClaimedRequest) -> IsEpisodeClaimedResponse:
        """Whether a client holds an episode now."""
        claim = self._keys.named(body.episode_uuid)
        uuid = body.episode_uuid if claim is None else claim.episode_uuid
        await self._interchange.recall([uuid])
        if uuid not in self._book:
            return IsEpisodeClaimedResponse(success=False)
        episode = self._book.get(uuid)
        held = episode.state == "claimed" and (claim is None or claim.attempt == episode.attempt)
        return IsEpisodeClaimedResponse(success=held, episode_status=episode.status)

    async def replay_latest_llm_call(
        self, body: ReplayLatestCallRequest, request: Request
    ) -> ReplayLatestCallResponse:
        """The latest recorded call of a claim: with its key, or as admin of an episode's last claim."""
        if body.episode_uuid and self._roles.grants("admin", authorization_of(request.scope)):
            named = self._keys.named(body.episode_uuid)
            await self._interchange.recall([named.episode_uuid if named else body.episode_uuid])
            claim = named or ClaimId(body.episode_uuid, self._book.get(body.episode_uuid).attempt)
        else:
            self._keys.authorize(request.scope)
            claim = self._keys.claim_of(request.scope, body.episode_uuid)
            await self._interchange.recall([claim.episode_uuid])
        calls = calls_of(await self._claims.recorded(*claim))
        if not calls:
            raise UnknownEpisodeError(f"claim {claim.attempt} of episode {claim.episode_uuid} has no call")
        return _replayed(calls)

    async def fleet(self) -> Response:
        """The current engine, batch, claims, clients and failures."""
        # FastAPI would validate the reply again, doubling the cost.
        found = fleet_response(self._interchange, self._link)
        return Response(found.model_dump_json(), media_type="application/json")

    async def stop_client(self, body: StopClientRequest) -> SuccessResponse:
        """Give a client no more episodes until the server restarts, and requeue its episodes."""
        self._interchange.stop_client(body.client_uuid)
        await self._interchange.commit()
        return SuccessResponse(success=True)

    async def update_engine_status(self, body: UpdateEngineStatusRequest) -> SuccessResponse:
        """Set the engine's status by hand, while no trainer is connected."""
        if self._link.connected:
            raise ConflictError("a trainer is connected and reports the engine's status itself")
        self._interchange.set_status(body.engine_status)
        return SuccessResponse(success=True)

    async def get_episode_buffer(
        self, body: GetEpisodeBufferRequest | None = None
    ) -> GetEpisodeBufferResponse:
        """The episodes with outcomes that the trainer has not used yet."""
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
        """The failed episodes with the failure of every attempt."""
        episodes = self._book.failed(after=after, limit=limit + 1)
        return FailedEpisodesResponse(
            episodes=[self._status(episode) for episode in episodes[:limit]], next=_next(episodes, limit)
        )

    async def retry_failed_episodes(self, body: FailedEpisodesRequest) -> FailedEpisodesReply:
        """Requeue failed episodes with a new budget of attempts, unless the trainer may know the failure."""
        return await self._each(body.episode_uuids, self._book.retry)

    async def drop_failed_episodes(self, body: FailedEpisodesRequest) -> FailedEpisodesReply:
        """Remove failed episodes from the list, unless the trainer waits for the failure."""
        return await self._each(body.episode_uuids, self._book.drop)

    async def _each(self, uuids: list[str], action: Callable[[str], object]) -> FailedEpisodesReply:
        done, refused = list[str](), dict[str, str]()
        await self._interchange.recall(uuids)
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
            **_shown_episode(episode),
            client_uuid=episode.client_uuid,
            episode_status=episode.status,
            latest_activity_timestamp=self._book.leases.last_activity(episode),
            allow_discard_timeout=episode.lease_s,
            discard_episode_timeout=episode.lease_s,
            attempt=episode.attempt,
            policy_version=episode.policy_version if episode.attempt else None,
            failures=episode.failures,
            acknowledged=episode.consumed,
        )


def batch_progress(interchange: Interchange, link: ServerLink) -> BatchProgressResponse:
    batch = interchange.engine.batch
    if batch is None or not link.connected:
        return BatchProgressResponse(collecting=False)
    fields = msgspec.structs.asdict(batch)
    return BatchProgressResponse(collecting=True, max_groups_ahead=interchange.max_groups_ahead, **fields)


def _engine_state(interchange: Interchange, link: ServerLink) -> dict[str, Any]:
    engine = interchange.engine
    return {
        "engine_status": engine.status,
        "policy_version": engine.policy_version,
        "global_step": engine.global_step,
        "trainer_connected": link.connected,
        "run_finished": engine.run_finished,
        "failure": engine.failure,
        "episodes": interchange.book.counts.by_type(),
    }


def fleet_response(interchange: Interchange, link: ServerLink) -> FleetResponse:
    book, quarantined = interchange.book, interchange.clients.quarantined()
    return FleetResponse(
        **_engine_state(interchange, link),
        waiting_clients=interchange.idle_clients,
        batch=batch_progress(interchange, link),
        claims=[_claim(book, episode) for episode in book.oldest_claims(MAX_CLAIMS)],
        clients=_clients(interchange, quarantined),
        failed=[_failed(episode) for episode in book.latest_failed(MAX_FAILED)],
        totals=FleetTotals(
            claims=book.claims_in_all,
            clients=book.active_clients,
            quarantined=len(quarantined),
            failed=book.failed_in_all,
        ),
    )


def _shown_episode(episode: EpisodeRecord) -> dict[str, Any]:
    return {
        "episode_uuid": episode.uuid,
        "group_id": episode.group_id,
        "episode_type": episode.episode_type,
        "pool": episode.pool,
    }


def _claim(book: EpisodeBook, episode: EpisodeRecord) -> FleetClaim:
    return FleetClaim(
        **_shown_episode(episode),
        client_uuid=episode.client_uuid,
        attempt=episode.attempt,
        age_s=round(book.leases.age_s(episode), 1),
        lease_left_s=round(book.leases.lease_left_s(episode), 1),
        calls_in_flight=episode.calls_in_flight,
        policy_version=episode.policy_version,
    )


def _clients(interchange: Interchange, quarantined: dict[str, str]) -> list[FleetClient]:
    busiest = dict(interchange.book.busiest_clients(SHOWN_CLIENTS))
    names = dict.fromkeys([*quarantined, *busiest, *interchange.clients.latest(SHOWN_CLIENTS)])
    return [_client(interchange, name, quarantined.get(name, "")) for name in list(names)[:SHOWN_CLIENTS]]


def _client(interchange: Interchange, name: str, quarantined: str) -> FleetClient:
    claims, clients = interchange.book.claims_held(name), interchange.clients
    record = clients.record(name)
    if record is None:
        return FleetClient(client_uuid=name, claims=claims, quarantined=quarantined)
    return FleetClient(
        client_uuid=name,
        claims=claims,
        ended=record.ended,
        failed=record.failed,
        episodes_per_min=round(clients.per_minute(record), 2),
        idle_s=round(clients.idle_s(record), 1),
        quarantined=quarantined,
    )


def _failed(episode: EpisodeRecord) -> DeadLetter:
    stands = episode.why_failure_stands()
    return DeadLetter(
        **_shown_episode(episode),
        failures=[_shown(failure) for failure in episode.failures[-MAX_FAILURES:]],
        acknowledged=episode.consumed,
        can_retry=not stands,
        why_not=stands,
    )


def _shown(failure: Failure) -> Failure:
    return failure.model_copy(update={"message": failure.message[:MAX_MESSAGE_CHARS]})


def _replayed(calls: list[Call]) -> ReplayLatestCallResponse:
    by_id = {call.call_id: call for call in calls}
    latest, line = calls[-1], list[Call]()
    call: Call | None = latest
    while call is not None:
        line.append(call)
        call = by_id[call.parent_id] if call.parent_id is not None else None
    messages = list[Any]()
    for earlier in reversed(line):
        messages += from_json(earlier.messages)
        if earlier is not latest:
            messages.append(from_json(earlier.reply))
    return ReplayLatestCallResponse(
        input={"messages": messages, "tools": from_json(line[-1].tools)},
        output=from_json(latest.reply),
        call_id=latest.call_id,
        policy_version=latest.policy_version,
        prompt_token_ids=unpack_ids(full_prompts(calls)[latest.call_id]).tolist(),
        token_ids=latest.sampled_ids.tolist(),
    )


def _next(episodes: list[EpisodeRecord], limit: int) -> int | None:
    return episodes[limit - 1].sequence if len(episodes) > limit else None
