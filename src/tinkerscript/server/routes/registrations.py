"""Endpoints that register episodes. Repeating a registration has no effect.

Groups in a client's pool are named `POOL/...`, and pool names have no slash, so groups cannot collide.
"""

from __future__ import annotations

import json

from fastapi import APIRouter, HTTPException, Request

from tinkerscript.access_tokens import ADMIN_TOKEN, Roles, authorization_of
from tinkerscript.asgi import RETRY_AFTER_S
from tinkerscript.errors import ConflictError, InterchangeError, QuotaError, UnauthorizedError
from tinkerscript.limits import PAYLOAD_BYTES
from tinkerscript.protocol import (
    TRAINER_POOL,
    RegisterEpisodeRequest,
    RegisterEpisodesRequest,
    RegisterEpisodesResponse,
    SuccessResponse,
)
from tinkerscript.server.interchange import Interchange
from tinkerscript.trainer_link.messages import NewEpisode


class RegistrationRoutes:
    """These routes check the role themselves."""

    def __init__(self, *, interchange: Interchange, roles: Roles) -> None:
        self._interchange = interchange
        self._roles = roles

    def router(self) -> APIRouter:
        router = APIRouter(tags=["interchange"])
        router.post("/register_episode")(self.register_episode)
        router.post("/register_episodes")(self.register_episodes)
        return router

    async def register_episode(self, body: RegisterEpisodeRequest, request: Request) -> SuccessResponse:
        """Register an episode or several copies: a client into its own pool, the admin into any."""
        account, is_admin = self._registering(request)
        new = _new_episode(body)
        await self._interchange.recall(new.uuids)
        self._register(new, account, is_admin=is_admin)
        await self._interchange.commit()
        return SuccessResponse(success=True)

    async def register_episodes(
        self, body: RegisterEpisodesRequest, request: Request
    ) -> RegisterEpisodesResponse:
        """Register many episodes with one commit. Each is registered or refused independently."""
        account, is_admin = self._registering(request)
        registered, refused, waits = list[str](), dict[str, str](), 0
        new_episodes = [_new_episode(each) for each in body.episodes]
        await self._interchange.recall(uuid for new in new_episodes for uuid in new.uuids)
        for new in new_episodes:
            try:
                self._register(new, account, is_admin=is_admin)
            except (InterchangeError, HTTPException) as error:
                reason = str(error.detail) if isinstance(error, HTTPException) else str(error)
                refused |= dict.fromkeys(new.uuids, reason)
                waits += isinstance(error, QuotaError) * len(new.uuids)
            else:
                registered += new.uuids
        await self._interchange.commit()
        return RegisterEpisodesResponse(
            success=not refused,
            registered=registered,
            refused=refused,
            retry_after_s=float(RETRY_AFTER_S) if refused and waits == len(refused) else 0.0,
        )

    def _registering(self, request: Request) -> tuple[str, bool]:
        self._roles.check("client", request.scope)
        return self._roles.account(request.scope), self._roles.grants(
            "admin", authorization_of(request.scope)
        )

    def _register(self, new: NewEpisode, account: str, *, is_admin: bool) -> None:
        if not is_admin:
            _check_own_pool(new)
        self._interchange.clients.check_pool(account, new.pool)
        if new.pool != TRAINER_POOL and new.episode_type == "train" and not self._interchange.trains_clients:
            raise ConflictError(
                "episode_type: this run trains on the samples of its task and would discard the result; "
                "register it as `eval`, or train without task.name"
            )
        try:
            self._interchange.register(new, limited=not (is_admin and new.pool == TRAINER_POOL))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error


def _new_episode(body: RegisterEpisodeRequest) -> NewEpisode:
    pool = body.client_uuid
    if "/" in pool:
        raise HTTPException(422, f"client_uuid: the name of a pool must not contain a slash, got {pool!r}")
    payload = json.dumps(body.payload, sort_keys=True).encode()
    if len(payload) > PAYLOAD_BYTES.limit:
        raise HTTPException(
            422,
            f"payload: has {len(payload)} bytes as JSON; {PAYLOAD_BYTES.limit} are allowed: leave files out, "
            "or let the program fetch them",
        )
    return NewEpisode(
        episode_uuid=body.episode_uuid,
        episode_type=body.episode_type,
        group_id=body.group_id or f"{pool}/{body.task_id or body.episode_uuid}",
        payload=payload,
        pool=pool,
        group_size=body.group_size or (body.copies if body.copies > 1 else 0),
        copies=body.copies,
    )


def _check_own_pool(new: NewEpisode) -> None:
    if new.pool == TRAINER_POOL:
        raise UnauthorizedError(
            403,
            "client_uuid: the trainer's pool (an empty name) needs the admin token "
            f"({ADMIN_TOKEN}); a client registers into the pool that its client_uuid names",
        )
    if not new.group_id.startswith(f"{new.pool}/"):
        raise UnauthorizedError(
            403,
            f"group_id: a group of the pool {new.pool!r} must begin with '{new.pool}/', got {new.group_id!r}",
        )
