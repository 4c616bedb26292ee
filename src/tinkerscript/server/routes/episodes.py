"""The endpoints of claims: claim, end, abort, can continue, heartbeat.

Invariants: nothing is answered before it is committed, and every refusal has a status that tells the client
what to do (see `asgi.Refusals`). To claim takes the client role, everything else the claim's own key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from fastapi import HTTPException, Request
from pydantic_core import from_json
from starlette.types import Receive

from tinkerscript.asgi import RETRY_AFTER_S, FastRoute
from tinkerscript.errors import (
    NotTheOwnerError,
    UnknownEpisodeError,
)
from tinkerscript.logs import about
from tinkerscript.protocol import (
    NO_EPISODES,
    POLICY,
    RUN_FINISHED,
    AbortEpisodeRequest,
    AwaitRunEndRequest,
    AwaitRunEndResponse,
    CanContinueEpisodeRequest,
    CanContinueEpisodeResponse,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    EndEpisodeRequest,
    EndEpisodeResponse,
    EpisodeClaim,
    Failure,
    SuccessResponse,
    WorkflowOutput,
    bounded,
    checked_reward,
)
from tinkerscript.server.accounts import Account, Accounts
from tinkerscript.server.auth import ClaimKeys, Roles, authorization_of
from tinkerscript.server.claims import LeasedClaims, gateway_path
from tinkerscript.server.episodes.record import Claim
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.tracing import claim_traceparent

MAX_BASE_URLS = 1000

BAD_PAYLOAD = "bad_payload"
"""Failure kind of an episode whose payload no reply can hold."""

logger = logging.getLogger(__name__)


class EpisodeRoutes:
    """The routes of rollout programs; all of them are fast."""

    def __init__(
        self,
        *,
        interchange: Interchange,
        keys: ClaimKeys,
        claims: LeasedClaims,
        accounts: Accounts | None,
        roles: Roles,
        metrics: ServerMetrics,
        public_base_url: str,
        max_metadata_bytes: int,
        max_reward: float,
        trained_roles: Collection[str],
        max_transcript_bytes: int = 0,
        model_roles: Sequence[str] = (),
        gateways: int = 0,
        run: str = "",
    ) -> None:
        """`model_roles`: names of the run's; `gateways`: as in `LeasedClaims`; `run`: its name."""
        self._gateways = gateways
        self._interchange = interchange
        self._book = interchange.book
        self._keys = keys
        self._claims = claims
        self._accounts = accounts
        self._roles = roles
        self._metrics = metrics
        self._max_metadata_bytes = max_metadata_bytes
        self._max_reward = max_reward
        self._trained_roles = trained_roles
        self._max_transcript_bytes = max_transcript_bytes
        self._model_roles = list(model_roles)
        self._run = run
        self._public_base_url = public_base_url.rstrip("/")
        self._base_urls: dict[tuple[str, bytes], str] = {}
        """Scheme and Host header -> the server's URL of such a request; cached: expensive to build."""

    def fast(self) -> dict[str, FastRoute]:
        """Path -> the frequent requests. To claim takes the client role, all others the claim's own key."""
        of_a_claim = self._keys.authorize
        return {
            "/claim_episode": FastRoute(self.claim_episode, partial(self._roles.check, "client")),
            "/await_run_end": FastRoute(self.await_run_end, partial(self._roles.check, "client")),
            "/end_episode": FastRoute(self.end_episode, of_a_claim),
            "/abort_episode": FastRoute(self.abort_episode, of_a_claim),
            "/can_continue_episode": FastRoute(self.can_continue_episode, of_a_claim),
            "/heartbeat_episode": FastRoute(self.heartbeat_episode, of_a_claim),
        }

    async def claim_episode(self, body: ClaimEpisodeRequest, request: Request) -> ClaimEpisodeResponse:
        """Claim the oldest registered episodes, waiting up to `wait_s` seconds for the first."""
        account = None
        if self._accounts is not None:
            authorization = authorization_of(request.scope)
            account = self._accounts.charged(authorization, await request.body())
            owner = self._accounts.owner(body.client_uuid, account)
            body = body.model_copy(update={"client_uuid": owner})
        if account is not None:
            account.use_pool(body.pool)
            if self._book.answered(body.client_uuid, body.claim_request_id) is None:
                account.check_claims()
        made = await self._claim_unless_gone(body, request.receive, account)
        claims = made if isinstance(made, str) else await self._readable(made, body, request)
        if isinstance(claims, str):
            return ClaimEpisodeResponse(
                success=False,
                client_uuid=body.client_uuid,
                fail_cause=claims,
                retry_after_s=RETRY_AFTER_S,
                run_finished=claims == RUN_FINISHED,
            )
        first, *rest = claims
        more = [EpisodeClaim.model_construct(**claim) for claim in rest]
        return ClaimEpisodeResponse.model_construct(success=True, more=more, **first)

    async def await_run_end(self, body: AwaitRunEndRequest, request: Request) -> AwaitRunEndResponse:
        """Whether the run is finished, waiting up to `wait_s` seconds for it."""
        account, owner = None, body.client_uuid
        if self._accounts is not None:
            account = self._accounts.charged(authorization_of(request.scope), await request.body())
            owner = self._accounts.owner(body.client_uuid, account)
        if body.report is not None:
            self._metrics.workers.add(owner, body.report)
        with account.watching() if account is not None else nullcontext():
            waiting = asyncio.create_task(self._interchange.run_end.wait(owner, body.wait_s))
            gone = asyncio.create_task(_disconnected(request.receive))
            try:
                await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
                return AwaitRunEndResponse(run_finished=waiting.done() and waiting.result())
            finally:
                waiting.cancel()
                gone.cancel()
                await asyncio.gather(waiting, gone, return_exceptions=True)

    async def _readable(
        self, claims: list[Claim], body: ClaimEpisodeRequest, request: Request
    ) -> list[dict[str, Any]] | str:
        """The claims as the reply has them; an episode whose payload cannot be sent fails, with the reason.

        The `fail_cause` if none is left.
        """
        url, readable = self._base_url(request), list[dict[str, Any]]()
        for claim in claims:
            try:
                readable.append(self._claimed(claim, url, with_alias=not body.sends_key))
            except ValueError as error:
                failure = Failure(kind=BAD_PAYLOAD, message=f"the payload cannot be sent: {error}")
                self._book.poison(claim.episode_uuid, claim.attempt, failure)
                with about(episode=claim.episode_uuid, attempt=claim.attempt):
                    logger.warning("episode.poisoned episode_uuid=%s error=%s", claim.episode_uuid, error)
        if len(readable) < len(claims):
            await self._interchange.commit()
        return readable or f"{NO_EPISODES} The oldest could not be handed out and has failed; ask again."

    def _base_url(self, request: Request) -> str:
        """The server's URL: the configured public one, or the one that this client used."""
        if self._public_base_url:
            return self._public_base_url
        host = next((value for name, value in request.scope["headers"] if name == b"host"), b"")
        used = (request.scope["scheme"], host)
        known = self._base_urls.get(used)
        if known is None:
            if len(self._base_urls) >= MAX_BASE_URLS:
                self._base_urls.clear()
            known = self._base_urls[used] = str(request.base_url).rstrip("/")
        return known

    def _models_url(self, base_url: str, episode_uuid: str, attempt: int) -> str:
        """The base URL of a claim's model calls: of the process that owns it."""
        if not self._gateways:
            return f"{base_url}/v1"
        number = self._keys.gateway(episode_uuid, attempt, of=self._gateways)
        return f"{base_url}{gateway_path(number)}/v1"

    def _claimed(self, claim: Claim, base_url: str, *, with_alias: bool) -> dict[str, Any]:
        """The fields of `EpisodeClaim`, not validated again: this server made them."""
        uuid, attempt = claim.episode_uuid, claim.attempt
        return {
            "client_uuid": claim.client_uuid,
            "episode_uuid": (with_alias and self._keys.alias(uuid, attempt)) or uuid,
            "openai_base_url": self._models_url(base_url, uuid, attempt),
            "openai_api_key": self._keys.key(uuid, attempt),
            "attempt": claim.attempt,
            "episode_type": claim.episode_type,
            "group_id": claim.group_id,
            "payload": from_json(claim.payload),
            "policy_version": claim.policy_version,
            "allow_discard_timeout": claim.lease_s,
            "max_claim_s": claim.left_s,
            "max_transcript_bytes": self._max_transcript_bytes,
            "roles": self._model_roles,
            "run": self._run,
            "traceparent": claim_traceparent(uuid, attempt),
        }

    async def _claim_unless_gone(
        self, body: ClaimEpisodeRequest, receive: Receive, account: Account | None
    ) -> list[Claim] | str:
        """Claim; stop waiting when the client hangs up."""
        if not body.wait_s:
            return await self._interchange.claim(body, account)
        claiming = asyncio.create_task(self._interchange.claim(body, account))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((claiming, gone), return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                return await claiming
            if claiming.done() and not isinstance(claims := claiming.result(), str):
                self._interchange.withdraw(body, claims)
            return "The client hung up."
        finally:
            claiming.cancel()
            gone.cancel()
            await asyncio.gather(claiming, gone, return_exceptions=True)

    async def end_episode(self, body: EndEpisodeRequest, request: Request) -> EndEpisodeResponse:
        """Submit the result of a claim. Idempotent for the same result."""
        reward = _checked_reward(body.workflow_output, self._max_reward, self._trained_roles)
        result = _encoded("workflow_output", body.workflow_output, self._max_metadata_bytes)
        claim = self._keys.claim_of(request.scope, body.episode_uuid)
        if self._accounts is not None and (holder := self._accounts.holder(*claim)) is not None:
            holder.send(await request.body())
        self._book.end(*claim, reward=reward, result=result)
        await self._interchange.commit()
        return EndEpisodeResponse(success=True)

    async def abort_episode(self, body: AbortEpisodeRequest, request: Request) -> SuccessResponse:
        """Record why the owner's attempt failed. The episode is requeued while it has attempts left."""
        _encoded("failure", body.failure, self._max_metadata_bytes)
        claim = self._keys.claim_of(request.scope, body.episode_uuid)
        if self._accounts is not None and (holder := self._accounts.holder(*claim)) is not None:
            holder.send(await request.body())
        self._book.abort(*claim, body.failure)
        await self._interchange.commit()
        return SuccessResponse(success=True)

    async def can_continue_episode(
        self, body: CanContinueEpisodeRequest, request: Request
    ) -> CanContinueEpisodeResponse:
        """Whether a result would be accepted and could train, and why not. Renews the lease."""
        reply = await self.heartbeat_episode(body, request)
        usable = self._interchange.engine.usable_versions
        if reply.can_continue and usable is not None and reply.policy_version_at_claim not in usable:
            claim = self._keys.claim_of(request.scope, body.episode_uuid)
            episode = self._book.get(claim.episode_uuid)
            oldest = await self._claims.oldest_version(episode)
            if episode.episode_type == "train" and oldest is not None and oldest not in usable:
                reply.can_continue, reply.stale = False, True
                reply.reason = (
                    f"stale: policy version {oldest} sampled a part of it, which is too old for the batch "
                    "that trains next; abort it, and it is handed out again"
                )
        return reply

    async def heartbeat_episode(
        self, body: CanContinueEpisodeRequest, request: Request
    ) -> CanContinueEpisodeResponse:
        """Renew the claim's lease; says whether it still holds, and why not."""
        version = self._interchange.engine.policy_version
        claim = self._keys.claim_of(request.scope, body.episode_uuid)
        try:
            episode = self._book.held(*claim)
        except (UnknownEpisodeError, NotTheOwnerError) as error:
            return CanContinueEpisodeResponse(can_continue=False, reason=str(error), policy_version=version)
        return CanContinueEpisodeResponse(
            can_continue=True, policy_version_at_claim=episode.policy_version, policy_version=version
        )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(field: str, message: WorkflowOutput | Failure, max_bytes: int) -> bytes:
    """`message` as JSON. Raises HTTPException: 422 for text that is not Unicode, 413 if it is too long."""
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


def _checked_reward(output: WorkflowOutput, bound: float, trained_roles: Collection[str]) -> float:
    """The scalar reward. Raises HTTPException 422 that names the field."""
    for role in output.role_rewards.keys() - {POLICY, *trained_roles}:
        raise HTTPException(
            422,
            f"workflow_output.role_rewards: {role!r} is no role that trains; this run trains "
            f"{', '.join([POLICY, *trained_roles])}",
        )
    try:
        for role in trained_roles:  # A score with the name of a role is its reward.
            name = f"score/{role}"
            bounded(f"workflow_output.log_metrics.{name}", output.log_metrics.get(name, 0.0), bound)
        return checked_reward(output, bound)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
