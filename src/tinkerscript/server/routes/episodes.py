"""Endpoints of a claim. A refusal's status shows the client how to react (`asgi.Refusals`)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import HTTPException, Request
from pydantic_core import from_json
from starlette.types import Receive

from tinkerscript.access_tokens import ClaimId, ClaimKeys, Roles
from tinkerscript.asgi import RETRY_AFTER_S, FastRoute
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConflictError, NotTheOwnerError, UnknownEpisodeError
from tinkerscript.ledger import Ledger
from tinkerscript.ledger.compression import opened
from tinkerscript.ledger.rows import TranscriptRow
from tinkerscript.limits import FAILURE_KIND, ID_CHARS, METADATA_DEPTH, OUTPUT_BYTES, depth_is_beyond
from tinkerscript.logs import about
from tinkerscript.protocol import (
    NO_EPISODES,
    POLICY,
    AbortEpisodeRequest,
    AwaitRunEndRequest,
    AwaitRunEndResponse,
    CanContinueEpisodeRequest,
    CanContinueEpisodeResponse,
    ClaimEpisodeRequest,
    ClaimEpisodeResponse,
    EndEpisodeRequest,
    EpisodeClaim,
    Failure,
    SuccessResponse,
    WorkflowOutput,
    bounded,
    checked_reward,
)
from tinkerscript.server.claims import LeasedClaims, gateway_path
from tinkerscript.server.episodes.record import BAD_PAYLOAD, SERVER_KINDS, Claim
from tinkerscript.server.interchange import Interchange

TRANSCRIPT_PATH = "/record_transcript"

# For transcripts received at once.
MAX_READING_BYTES = 64 * 2**20

_TRANSCRIPT_BODY: dict[str, Any] = {
    "requestBody": {
        "description": "The transcript. The server does not parse it.",
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

MAX_BASE_URLS = 1000
MAX_GROUPS = 10_000

_CLAIMED = ClaimEpisodeResponse(success=True)

_PORT = re.compile(r":[0-9]*$")

logger = logging.getLogger(__name__)


class EpisodeRoutes:
    def __init__(
        self,
        *,
        interchange: Interchange,
        ledger: Ledger,
        keys: ClaimKeys,
        claims: LeasedClaims,
        roles: Roles,
        config: RunConfig,
        gateway_ports: Sequence[int] = (),
        run: str = "",
    ) -> None:
        self._interchange = interchange
        self._book = interchange.book
        self._ledger = ledger
        self._keys = keys
        self._claims = claims
        self._roles = roles
        self._public_base_url = config.interchange_server.public_base_url.rstrip("/")
        self._max_reward = config.interchange_server.max_reward
        self._max_transcript_bytes = config.max_transcript_bytes
        self._trained_roles = config.trained_roles
        self._model_roles = list(config.episode_roles)
        self._gateway_ports = gateway_ports
        self._run = run
        self._reading = 0
        self._tasks_of_groups: dict[str, str] = {}
        self._base_urls: dict[tuple[str, bytes], str] = {}
        """(scheme, Host header) -> the server's URL, which is slow to build."""

    def fast(self) -> dict[str, FastRoute]:
        """Claiming requires the client role, everything else the claim's key."""
        of_a_claim = self._keys.authorize
        return {
            "/claim_episode": FastRoute(self.claim_episode, partial(self._roles.check, "client")),
            "/await_run_end": FastRoute(self.await_run_end, partial(self._roles.check, "client")),
            "/end_episode": FastRoute(self.end_episode, of_a_claim),
            "/abort_episode": FastRoute(self.abort_episode, of_a_claim),
            "/can_continue_episode": FastRoute(self.can_continue_episode, of_a_claim),
            "/heartbeat_episode": FastRoute(self.heartbeat_episode, of_a_claim),
            TRANSCRIPT_PATH: FastRoute(self.record_transcript, of_a_claim, _TRANSCRIPT_BODY),
        }

    async def claim_episode(self, body: ClaimEpisodeRequest, request: Request) -> ClaimEpisodeResponse:
        """Claim the oldest registered episodes, waiting up to `wait_s` seconds for the first."""
        clients = self._interchange.clients
        account = self._roles.account(request.scope)
        clients.check_pool(account, body.pool)
        owner = clients.owner(body.client_uuid, account)
        if owner != body.client_uuid:
            body = body.model_copy(update={"client_uuid": owner})
        if self._book.answered(owner, body.claim_request_id) is None:
            clients.check_waiting(owner, "an episode")
        made = await self._claim_unless_gone(body, request.receive)
        claims = made if isinstance(made, str) else await self._readable(made, body, request)
        if isinstance(claims, str):
            return ClaimEpisodeResponse(
                success=False,
                client_uuid=body.client_uuid,
                fail_cause=claims,
                retry_after_s=RETRY_AFTER_S,
                run_finished=claims == self._interchange.why_over,
            )
        first, *rest = claims
        more = [EpisodeClaim.model_construct(**claim) for claim in rest]
        # Faster than `model_construct`.
        return _CLAIMED.model_copy(update={**first, "more": more})

    async def await_run_end(self, body: AwaitRunEndRequest, request: Request) -> AwaitRunEndResponse:
        """Whether the run is finished, waiting up to `wait_s` seconds for its end."""
        clients = self._interchange.clients
        owner = clients.owner(body.client_uuid, self._roles.account(request.scope))
        with clients.waiting(owner, "the run's end"):
            waiting = asyncio.create_task(self._interchange.run_end.wait(owner, body.wait_s))
            gone = asyncio.create_task(_disconnected(request.receive))
            try:
                await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
                is_over = waiting.done() and waiting.result()
                cause = self._interchange.why_over if is_over else ""
                return AwaitRunEndResponse(run_finished=is_over, fail_cause=cause)
            finally:
                waiting.cancel()
                gone.cancel()
                await asyncio.gather(waiting, gone, return_exceptions=True)

    async def _readable(
        self, claims: list[Claim], body: ClaimEpisodeRequest, request: Request
    ) -> list[dict[str, Any]] | str:
        """Episodes that cannot be sent fail. Returns the `fail_cause` if no claim is left."""
        url, readable = self._base_url(request), list[dict[str, Any]]()
        for claim in claims:
            try:
                readable.append(self._claimed(claim, url, with_alias=not body.sends_key))
            except Exception as error:  # noqa: BLE001 - or this episode would block all later ones
                failure = Failure(kind=BAD_PAYLOAD, message=f"the payload cannot be sent: {error}")
                self._book.poison(claim.episode_uuid, claim.attempt, failure)
                with about(episode=claim.episode_uuid, attempt=claim.attempt):
                    logger.warning("episode.poisoned episode_uuid=%s error=%s", claim.episode_uuid, error)
        if len(readable) < len(claims):
            await self._interchange.commit()
        return readable or f"{NO_EPISODES} The oldest could not be handed out and has failed; ask again."

    def _base_url(self, request: Request) -> str:
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
        if not self._gateway_ports:
            return f"{base_url}/v1"
        number = self._keys.gateway(episode_uuid, attempt, of=len(self._gateway_ports))
        if not self._public_base_url:
            scheme, _, host = base_url.partition("://")
            base_url = f"{scheme}://{_PORT.sub('', host)}:{self._gateway_ports[number - 1]}"
        return f"{base_url}{gateway_path(number)}/v1"

    def _claimed(self, claim: Claim, base_url: str, *, with_alias: bool) -> dict[str, Any]:
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
        }

    async def _claim_unless_gone(self, body: ClaimEpisodeRequest, receive: Receive) -> list[Claim] | str:
        if not body.wait_s:
            return await self._interchange.claim(body)
        claiming = asyncio.create_task(self._interchange.claim(body))
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

    async def _claim_of(self, request: Request, episode_uuid: str = "") -> ClaimId:
        claim = self._keys.claim_of(request.scope, episode_uuid)
        if claim.episode_uuid not in self._book:
            await self._interchange.recall([claim.episode_uuid])
        return claim

    async def end_episode(self, body: EndEpisodeRequest, request: Request) -> SuccessResponse:
        """Submit the result of a claim. Idempotent for the same result."""
        reward = _checked_reward(body.workflow_output, self._max_reward, self._trained_roles)
        result = _encoded("workflow_output", body.workflow_output)
        if depth_is_beyond(body.workflow_output.metadata, METADATA_DEPTH.limit):
            raise HTTPException(
                422, f"workflow_output.metadata: nested more than {METADATA_DEPTH.limit} deep; flatten it"
            )
        claim = await self._claim_of(request, body.episode_uuid)
        group = self._book.get(claim.episode_uuid).group_id if body.task_id else ""
        task = self._tasks_of_groups.get(group, body.task_id)
        if task != body.task_id:
            raise ConflictError(
                f"task_id: the group {group!r} has a result of the task {task!r}, and rewards of "
                f"{body.task_id!r} cannot be compared with it; work on the sample in the claim's payload, or "
                "register your own tasks with register_episode, each with its task_id"
            )
        if body.workflow_output.call_rewards:
            await self._check_calls(claim, body.workflow_output.call_rewards)
        solved = body.workflow_output.is_success
        self._book.end(*claim, reward=reward, result=result, is_success=solved)
        if group:
            self._tasks_of_groups[group] = task
            if len(self._tasks_of_groups) > MAX_GROUPS:
                del self._tasks_of_groups[next(iter(self._tasks_of_groups))]
        await self._interchange.commit()
        return SuccessResponse(success=True)

    async def _check_calls(self, claim: ClaimId, rewards: Mapping[str, float]) -> None:
        episode = self._book.get(claim.episode_uuid)
        if episode.why_lost(claim.attempt):
            return  # A retry, when the calls may be gone, or `end` says why not.
        roles = await self._claims.roles_of_calls(episode, claim.attempt)
        for call_id in rewards:
            name = f"workflow_output.call_rewards: {call_id[:ID_CHARS]!r}"
            if call_id not in roles:
                latest = [each for each, role in roles.items() if not role][-3:]
                known = f"the latest are {', '.join(latest)}" if latest else "it made none"
                raise HTTPException(
                    422, f"{name} is not a model call of this claim ({known}); use the `id` of a reply"
                )
            if roles[call_id]:
                raise HTTPException(
                    422,
                    f"{name} is a call of the role {roles[call_id]!r}; only calls of the policy have rewards "
                    "here, and a role that trains has one in role_rewards",
                )

    async def abort_episode(self, body: AbortEpisodeRequest, request: Request) -> SuccessResponse:
        """Record why an attempt failed. The episode is requeued while it has attempts left."""
        _encoded("failure", body.failure)
        kind = body.failure.kind
        if len(kind) > FAILURE_KIND.limit:
            raise HTTPException(
                422, f"failure.kind: has at most {FAILURE_KIND.limit} characters; the rest is its message"
            )
        if kind in SERVER_KINDS:
            raise HTTPException(422, f"failure.kind: {kind!r} is the server's own; use another")
        claim = await self._claim_of(request, body.episode_uuid)
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
            claim = await self._claim_of(request, body.episode_uuid)
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
        """Renew the claim's lease. Says whether the claim still holds it, and why not."""
        version = self._interchange.engine.policy_version
        claim = await self._claim_of(request, body.episode_uuid)
        try:
            episode = self._book.held(*claim)
        except (UnknownEpisodeError, NotTheOwnerError) as error:
            return CanContinueEpisodeResponse(can_continue=False, reason=str(error), policy_version=version)
        return CanContinueEpisodeResponse(
            can_continue=True, policy_version_at_claim=episode.policy_version, policy_version=version
        )

    async def record_transcript(self, request: Request) -> SuccessResponse:
        """Store the transcript of a claim that has not ended, replacing an earlier one, for the page."""
        claim = await self._claim_of(request)
        self._book.held(*claim)
        length = self._transcript_length(request)
        self._reading += length
        try:
            body = await request.body()
        finally:
            self._reading -= length
        episode = self._book.held(*claim)
        self._ledger.put(
            TranscriptRow(episode=episode.sequence, attempt=claim.attempt, transcript=opened(bytes(body)))
        )
        await self._interchange.commit()
        return SuccessResponse(success=True)

    def _transcript_length(self, request: Request) -> int:
        try:
            length = int(request.headers["content-length"])
        except (KeyError, ValueError):
            raise HTTPException(411, "send the transcript's length in a Content-Length header") from None
        limit = self._max_transcript_bytes
        if not 0 < length <= limit:
            takes = f"1 to {limit}" if limit else "none (recording: off)"
            raise HTTPException(413, f"the transcript has {length} bytes; this run takes {takes}")
        if self._reading + length > MAX_READING_BYTES:
            raise HTTPException(503, f"{self._reading} bytes of transcripts are being received; try again")
        return length


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(field: str, message: WorkflowOutput | Failure) -> bytes:
    try:
        encoded = message.__pydantic_serializer__.to_json(message)
    except ValueError as error:
        raise HTTPException(422, f"{field}: cannot be written as JSON: {error}") from error
    if len(encoded) > OUTPUT_BYTES.limit:
        raise HTTPException(
            413, f"{field}: has {len(encoded)} bytes as JSON; {OUTPUT_BYTES.name} allows {OUTPUT_BYTES.limit}"
        )
    return encoded


def _checked_reward(output: WorkflowOutput, bound: float, trained_roles: Collection[str]) -> float:
    for role in output.role_rewards.keys() - {POLICY, *trained_roles}:
        raise HTTPException(
            422,
            f"workflow_output.role_rewards: {role!r} is not a role that trains; this run trains "
            f"{', '.join([POLICY, *trained_roles])}",
        )
    try:
        for role in trained_roles:  # It marks that role's reward.
            name = f"score/{role}"
            bounded(f"workflow_output.log_metrics.{name}", output.log_metrics.get(name, 0.0), bound)
        return checked_reward(output, bound)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
