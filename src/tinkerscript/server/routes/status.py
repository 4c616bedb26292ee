"""The endpoints that say how things stand: engine, batch, one episode, a claim's latest call, metrics.

Invariant: they change nothing. `/health` and `/ready` are open; where tokens are set, all others take a
client's, or the key of the claim that they are about.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from tinkerscript import __version__
from tinkerscript.errors import UnknownEpisodeError
from tinkerscript.protocol import (
    BatchProgressResponse,
    EngineStatusResponse,
    HealthResponse,
    IsEpisodeClaimedRequest,
    IsEpisodeClaimedResponse,
    ReadyResponse,
    ReplayLatestCallRequest,
    ReplayLatestCallResponse,
)
from tinkerscript.rollouts.call import Call, calls_of, full_prompts, unpack_ids
from tinkerscript.server.auth import ClaimId, ClaimKeys, Roles, authorization_of
from tinkerscript.server.claims import LeasedClaims
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import CONTENT_TYPE, ServerMetrics
from tinkerscript.trainer_link.server_end import ServerLink


class StatusRoutes:
    """The routes of whoever looks on."""

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
        """All routes. Those about an episode check the role or the key themselves."""
        router = APIRouter(tags=["interchange"])
        router.get("/get_engine_status")(self.get_engine_status)
        router.get("/get_batch_progress")(self.get_batch_progress)
        router.get("/health")(self.health)
        router.get("/ready")(self.ready)
        router.get("/metrics", response_class=Response)(self.metrics)
        router.post("/is_episode_claimed")(self.is_episode_claimed)
        router.post("/replay_latest_llm_call")(self.replay_latest_llm_call)
        return router

    async def get_engine_status(self) -> EngineStatusResponse:
        """The engine's state, and the number of episodes in each state."""
        engine = self._interchange.engine
        return EngineStatusResponse(
            engine_status=engine.status,
            policy_version=engine.policy_version,
            global_step=engine.global_step,
            model=engine.model,
            episodes=self._book.counts.by_type(),
            pools=self._book.counts.by_pool(),
            waiting_clients=self._interchange.waiting_clients,
            active_clients=self._book.active_clients,
            trainer_connected=self._link.connected,
            run_finished=engine.run_finished,
            failure=engine.failure,
            quarantined=self._interchange.quarantine.reasons(),
        )

    async def health(self) -> HealthResponse:
        """Whether the server is up."""
        return HealthResponse(version=__version__)

    async def ready(self) -> ReadyResponse:
        """Whether this server serves the run's episodes: one that waits for another to end answers 503."""
        return ReadyResponse(epoch=self._link.epoch)

    async def metrics(self) -> Response:
        """Counters and gauges for Prometheus."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def get_batch_progress(self) -> BatchProgressResponse:
        """What the trainer waits for before its next step, and who runs ahead of it."""
        return batch_progress(self._interchange, self._link)

    async def is_episode_claimed(
        self, body: IsEpisodeClaimedRequest, request: Request
    ) -> IsEpisodeClaimedResponse:
        """Whether a client holds an episode at this moment."""
        self._roles.check("client", request.scope)
        claim = self._keys.named(body.episode_uuid)
        uuid = body.episode_uuid if claim is None else claim.episode_uuid
        if uuid not in self._book:
            return IsEpisodeClaimedResponse(success=False)
        episode = self._book.get(uuid)
        held = episode.state == "claimed" and (claim is None or claim.attempt == episode.attempt)
        return IsEpisodeClaimedResponse(success=held, episode_status=episode.state)

    async def replay_latest_llm_call(
        self, body: ReplayLatestCallRequest, request: Request
    ) -> ReplayLatestCallResponse:
        """The latest recorded call of a claim: with its key, or for the admin of an episode's last claim."""
        if body.episode_uuid and self._roles.grants("admin", authorization_of(request.scope)):
            named = self._keys.named(body.episode_uuid)
            claim = named or ClaimId(body.episode_uuid, self._book.get(body.episode_uuid).attempt)
        else:
            self._keys.authorize(request.scope)
            claim = self._keys.claim_of(request.scope, body.episode_uuid)
        calls = calls_of(await self._claims.recorded(*claim))
        if not calls:
            raise UnknownEpisodeError(f"claim {claim.attempt} of episode {claim.episode_uuid} has no call")
        return _replayed(calls)


def batch_progress(interchange: Interchange, link: ServerLink) -> BatchProgressResponse:
    """What the connected trainer waits for."""
    batch = interchange.engine.batch
    if batch is None or not link.connected:
        return BatchProgressResponse(collecting=False)
    fields = msgspec.structs.asdict(batch)
    del fields["groups_needed"]
    return BatchProgressResponse(collecting=True, max_groups_ahead=interchange.max_groups_ahead, **fields)


def _replayed(calls: list[Call]) -> ReplayLatestCallResponse:
    """The last of a claim's calls, with the whole prompt that it had."""
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
