"""The HTTP endpoints of the interchange, as thin as they can be: check the role, call, answer.

Invariant: nothing is answered before it is committed, and every refusal is a `RefusalResponse` with a status
that says what to do (see `refusals`).

`/register_episode`: the trainer's pool and foreign groups for the admin, its own pool for a client.

Invariant: the name of a group in a client's pool begins with the pool and a slash, and no pool's name has a
slash in it, so groups of different pools never meet.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.params import Depends
from pydantic_core import from_json
from starlette.types import Receive

from tinkerscript import __version__
from tinkerscript.asgi.fast_routes import JsonEndpoint
from tinkerscript.errors import NotTheOwnerError, UnauthorizedError, UnknownEpisodeError
from tinkerscript.protocol import (
    TRAINER_POOL,
    AbortEpisodeRequest,
    CanContinueEpisodeRequest,
    CanContinueEpisodeResponse,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    EndEpisodeRequest,
    EndEpisodeResponse,
    EngineStatusResponse,
    EpisodeClaim,
    Failure,
    HealthResponse,
    RegisterEpisodeRequest,
    RegisterEpisodeResponse,
    SuccessResponse,
    WorkflowOutput,
    total_reward,
)
from tinkerscript.server.auth import ADMIN_TOKEN, Role, Roles
from tinkerscript.server.claims import LeasedClaims
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import Claim
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import CONTENT_TYPE, ServerMetrics
from tinkerscript.trainer_link.messages import NewEpisode
from tinkerscript.trainer_link.server_end import ServerLink

RETRY_AFTER_S = 1.0
"""Seconds after which a client that got no episode should ask again."""


MAX_BASE_URLS = 1000


class Endpoints:
    """The endpoints over one interchange."""

    def __init__(
        self,
        *,
        interchange: Interchange,
        book: EpisodeBook,
        link: ServerLink,
        claims: LeasedClaims,
        metrics: ServerMetrics,
        public_base_url: str,
        max_metadata_bytes: int,
    ) -> None:
        self._interchange = interchange
        self._book = book
        self._link = link
        self._claims = claims
        self._metrics = metrics
        self._max_metadata_bytes = max_metadata_bytes
        self._public_base_url = public_base_url.rstrip("/")
        self._base_urls: dict[bytes, str] = {}
        """The URL by which a client reached this server, by its Host header; few, and dear to make."""

    def of_claims(self) -> list[JsonEndpoint]:
        """What rollout programs ask for, again and again."""
        return [
            JsonEndpoint("/claim_episode", "client", self.claim_episode),
            JsonEndpoint("/end_episode", "client", self.end_episode),
            JsonEndpoint("/abort_episode", "client", self.abort_episode),
            JsonEndpoint("/can_continue_episode", "client", self.can_continue_episode),
            JsonEndpoint("/heartbeat_episode", "client", self.heartbeat_episode),
        ]

    def router(self) -> APIRouter:
        """The open routes."""
        router = APIRouter()
        router.get("/get_engine_status")(self.get_engine_status)
        router.get("/health")(self.health)
        router.get("/metrics", response_class=Response)(self.metrics)
        return router

    async def claim_episode(self, body: ClaimEpisodeRequest, request: Request) -> ClaimEpisodeResponse:
        """Claim the oldest registered episodes, waiting up to `wait_s` seconds for the first."""
        claimed = await self._claim_unless_gone(body, request.receive)
        if isinstance(claimed, str):
            return ClaimEpisodeResponse(
                success=False,
                client_uuid=body.client_uuid,
                fail_cause=claimed,
                retry_after_s=RETRY_AFTER_S,
            )
        url = self._openai_base_url(request)
        first, *rest = claimed
        more = [EpisodeClaim.model_construct(**self._claimed(claim, url)) for claim in rest]
        return ClaimEpisodeResponse.model_construct(success=True, more=more, **self._claimed(first, url))

    def _openai_base_url(self, request: Request) -> str:
        """Where the model is called: under the public URL, or under the one that this client used."""
        if self._public_base_url:
            return f"{self._public_base_url}/v1"
        host = next((value for name, value in request.scope["headers"] if name == b"host"), b"")
        known = self._base_urls.get(host)
        if known is None:
            if len(self._base_urls) >= MAX_BASE_URLS:
                self._base_urls.clear()
            known = self._base_urls[host] = f"{str(request.base_url).rstrip('/')}/v1"
        return known

    def _claimed(self, claim: Claim, openai_base_url: str) -> dict[str, Any]:
        """The fields of `EpisodeClaim`: made by this server, so they are not checked again."""
        return {
            "client_uuid": claim.client_uuid,
            "episode_uuid": claim.episode_uuid,
            "openai_base_url": openai_base_url,
            "openai_api_key": self._claims.key(claim.episode_uuid, claim.attempt),
            "attempt": claim.attempt,
            "episode_type": claim.episode_type,
            "group_id": claim.group_id,
            "payload": from_json(claim.payload),
            "policy_version": claim.policy_version,
            "allow_discard_timeout": claim.lease_s,
            "max_claim_s": claim.left_s,
        }

    async def _claim_unless_gone(self, body: ClaimEpisodeRequest, receive: Receive) -> list[Claim] | str:
        """Claim; a client that hangs up while it waits leaves the line."""
        if not body.wait_s:
            return await self._interchange.claim(body)
        claiming = asyncio.create_task(self._interchange.claim(body))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((claiming, gone), return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                return await claiming
            if claiming.done() and not isinstance(claims := claiming.result(), str):
                self._interchange.hung_up(body, claims)
            return "The client is gone."
        finally:
            claiming.cancel()
            gone.cancel()
            await asyncio.gather(claiming, gone, return_exceptions=True)

    async def end_episode(self, body: EndEpisodeRequest, request: Request) -> EndEpisodeResponse:
        """Hand in the result of a claim. Repeated with the same content it gets the same answer."""
        reward = _checked_reward(body.workflow_output)
        result = _encoded("workflow_output", body.workflow_output, self._max_metadata_bytes)
        self._interchange.end(body.episode_uuid, body.client_uuid, body.attempt, reward=reward, result=result)
        await self._interchange.durable()
        return EndEpisodeResponse(success=True)

    async def abort_episode(self, body: AbortEpisodeRequest, request: Request) -> SuccessResponse:
        """Record why the owner's attempt failed; the episode is handed out again while attempts are left."""
        _encoded("failure", body.failure, self._max_metadata_bytes)
        self._interchange.abort(body.episode_uuid, body.client_uuid, body.attempt, body.failure)
        await self._interchange.durable()
        return SuccessResponse(success=True)

    async def can_continue_episode(
        self, body: CanContinueEpisodeRequest, request: Request
    ) -> CanContinueEpisodeResponse:
        """Whether the claim still counts, and why not. Renews its lease."""
        version = self._interchange.engine.policy_version
        try:
            episode = self._interchange.held(body.episode_uuid, body.client_uuid, body.attempt)
        except (UnknownEpisodeError, NotTheOwnerError) as error:
            return CanContinueEpisodeResponse(can_continue=False, reason=str(error), policy_version=version)
        return CanContinueEpisodeResponse(
            can_continue=True, policy_version_at_claim=episode.policy_version, policy_version=version
        )

    async def heartbeat_episode(
        self, body: CanContinueEpisodeRequest, request: Request
    ) -> CanContinueEpisodeResponse:
        """Renew the claim's lease, and say whether it still counts. The same as `/can_continue_episode`."""
        return await self.can_continue_episode(body, request)

    async def get_engine_status(self) -> EngineStatusResponse:
        """The engine's state, and how many episodes are in which state."""
        engine = self._interchange.engine
        return EngineStatusResponse(
            engine_status=engine.status,
            policy_version=engine.policy_version,
            global_step=engine.global_step,
            model=engine.model,
            episodes=self._book.census.counts(),
            pools=self._book.census.pools(),
            waiting_clients=self._interchange.waiting_clients,
            active_clients=self._book.active_clients,
            trainer_connected=self._link.connected,
        )

    async def health(self) -> HealthResponse:
        """The server answers."""
        return HealthResponse(version=__version__)

    async def metrics(self) -> Response:
        """Counters and gauges for Prometheus."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)


def requires(roles: Roles, role: Role) -> list[Depends]:
    """The dependencies of a route that needs `role`."""

    async def require(request: Request) -> None:
        roles.check(role, request.scope)

    return [Depends(require)]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(field: str, message: WorkflowOutput | Failure, max_bytes: int) -> bytes:
    """`message` as JSON. Raises HTTPException: 422 for text that is not Unicode, 413 for too much of it."""
    try:
        encoded = message.model_dump_json().encode()
    except ValueError as error:
        raise HTTPException(422, f"{field}: cannot be written as JSON: {error}") from error
    if len(encoded) > max_bytes:
        raise HTTPException(
            413,
            f"{field}: has {len(encoded)} bytes as JSON; "
            f"interchange_server.max_metadata_bytes allows {max_bytes}",
        )
    return encoded


def _checked_reward(output: WorkflowOutput) -> float:
    """The scalar reward. Raises HTTPException 422 that names the field."""
    reward = total_reward(output)
    if reward is None:
        raise HTTPException(
            422,
            "workflow_output.reward: a result needs a reward; an attempt without one is a failure: "
            "POST /abort_episode with the reason",
        )
    if not math.isfinite(reward):
        raise HTTPException(422, f"workflow_output.reward: must be finite, got {reward}")
    for name, value in output.log_metrics.items():
        if not math.isfinite(value):
            raise HTTPException(422, f"workflow_output.log_metrics.{name}: must be finite, got {value}")
    return reward


def register_router(interchange: Interchange, roles: Roles) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/register_episode")
    async def register_episode(  # pyright: ignore[reportUnusedFunction]
        body: RegisterEpisodeRequest, request: Request
    ) -> RegisterEpisodeResponse:
        """Register one episode: a client into its own pool, as far as its quota goes; the admin anywhere."""
        authorization = request.headers.get("authorization", "")
        roles.require("client", authorization)
        new = _episode(body)
        is_admin = roles.grants("admin", authorization)
        if not is_admin:
            _check_own(new)
        try:
            if is_admin and new.pool == TRAINER_POOL:
                interchange.register(new)
            else:
                interchange.register_for_client(new)
        except ValueError as error:
            raise HTTPException(422, f"payload: {error}") from error
        await interchange.durable()
        return RegisterEpisodeResponse(success=True)

    return router


def _episode(body: RegisterEpisodeRequest) -> NewEpisode:
    """Raises HTTPException 422 for a name that cannot be a pool's."""
    pool = body.client_uuid
    if "/" in pool:
        raise HTTPException(422, f"client_uuid: the name of a pool has no slash in it, got {pool!r}")
    return NewEpisode(
        episode_uuid=body.episode_uuid,
        episode_type=body.episode_type,
        # Without a task's name the episode stands alone: its sample is compared with no other.
        group_id=body.group_id or f"{pool}/{body.task_id or body.episode_uuid}",
        payload=json.dumps(body.payload, sort_keys=True).encode(),
        pool=pool,
        group_size=body.group_size,
    )


def _check_own(new: NewEpisode) -> None:
    """Raises UnauthorizedError 403 for what only the admin may register."""
    if new.pool == TRAINER_POOL:
        raise UnauthorizedError(
            403,
            "client_uuid: the trainer's pool (an empty name) needs the admin's token "
            f"({ADMIN_TOKEN}); a client registers into the pool that its client_uuid names",
        )
    if not new.group_id.startswith(f"{new.pool}/"):
        raise UnauthorizedError(
            403, f"group_id: a group of the pool {new.pool!r} begins with '{new.pool}/', got {new.group_id!r}"
        )
