"""`/register_episode`: the trainer's pool and foreign groups for the admin, its own pool for a client.

Invariant: the name of a group in a client's pool begins with the pool and a slash, and no pool's name has a
slash in it, so groups of different pools never meet.
"""

from __future__ import annotations

import json

from fastapi import APIRouter, HTTPException, Request

from tinkerscript.errors import UnauthorizedError
from tinkerscript.protocol import TRAINER_POOL, RegisterEpisodeRequest, RegisterEpisodeResponse
from tinkerscript.server.auth import ADMIN_TOKEN, Roles
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.messages import NewEpisode


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
