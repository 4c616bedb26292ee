"""The endpoints that register episodes: one with its copies, or many at once.

Invariants: nothing is answered before it is committed, and a registration that is repeated changes nothing.
The admin registers anywhere, a client into its own pool. A group in a client's pool is named `POOL/...`, and
no pool's name contains a slash, so groups of different pools never meet.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
from fastapi import APIRouter, HTTPException, Request

from tinkerscript.asgi import RETRY_AFTER_S
from tinkerscript.errors import ConflictError, InterchangeError, QuotaError, UnauthorizedError
from tinkerscript.protocol import (
    TRAINER_POOL,
    RegisterEpisodeRequest,
    RegisterEpisodeResponse,
    RegisterEpisodesRequest,
    RegisterEpisodesResponse,
)
from tinkerscript.server.accounts import Account, Accounts
from tinkerscript.server.auth import ADMIN_TOKEN, Roles, authorization_of
from tinkerscript.server.interchange import Interchange
from tinkerscript.trainer_link.messages import NewEpisode


class RegistrationRoutes:
    """The routes of whoever brings samples. They check the role themselves."""

    def __init__(self, *, interchange: Interchange, roles: Roles, accounts: Accounts | None) -> None:
        self._interchange = interchange
        self._roles = roles
        self._accounts = accounts

    def router(self) -> APIRouter:
        """All routes."""
        router = APIRouter(tags=["interchange"])
        router.post("/register_episode")(self.register_episode)
        router.post("/register_episodes")(self.register_episodes)
        return router

    async def register_episode(
        self, body: RegisterEpisodeRequest, request: Request
    ) -> RegisterEpisodeResponse:
        """Register one episode, or several copies: a client into its own pool, within its quota; the admin
        into any pool."""
        account, is_admin = await self._registering(request, body.copies)
        for new in _new_episodes(body):
            self._register(new, account, is_admin=is_admin)
        await self._interchange.commit()
        return RegisterEpisodeResponse(success=True)

    async def register_episodes(
        self, body: RegisterEpisodesRequest, request: Request
    ) -> RegisterEpisodesResponse:
        """Register many episodes with one commit. Each is registered or refused independently."""
        account, is_admin = await self._registering(request, sum(each.copies for each in body.episodes))
        registered, refused, waits = list[str](), dict[str, str](), 0
        for new in (new for each in body.episodes for new in _new_episodes(each)):
            try:
                self._register(new, account, is_admin=is_admin)
            except (InterchangeError, HTTPException) as error:
                refused[new.episode_uuid] = (
                    str(error.detail) if isinstance(error, HTTPException) else str(error)
                )
                waits += isinstance(error, QuotaError)
            else:
                registered.append(new.episode_uuid)
        await self._interchange.commit()
        return RegisterEpisodesResponse(
            success=not refused,
            registered=registered,
            refused=refused,
            retry_after_s=float(RETRY_AFTER_S) if refused and waits == len(refused) else 0.0,
        )

    async def _registering(self, request: Request, number: int) -> tuple[Account | None, bool]:
        """Who registers `number` episodes, with the request counted: its account, and whether it is the
        admin."""
        authorization = authorization_of(request.scope)
        self._roles.require("client", authorization)
        account = None
        if self._accounts is not None:
            body = await request.body()
            account = self._accounts.charged(authorization, body, registrations=number)
        return account, self._roles.grants("admin", authorization)

    def _register(self, new: NewEpisode, account: Account | None, *, is_admin: bool) -> None:
        """Raises InterchangeError for what is refused, and HTTPException 422 for what is malformed."""
        if not is_admin:
            _check_own_pool(new)
        if account is not None:
            account.use_pool(new.pool)
        if new.pool != TRAINER_POOL and new.episode_type == "train" and not self._interchange.trains_clients:
            raise ConflictError(
                "episode_type: this run trains on the samples of its task and would discard the result; "
                "register it as `eval`, or train without task.name"
            )
        try:
            self._interchange.register(new, limited=not (is_admin and new.pool == TRAINER_POOL))
        except ValueError as error:
            raise HTTPException(422, f"payload: {error}") from error


def _new_episodes(body: RegisterEpisodeRequest) -> Iterator[NewEpisode]:
    """The episode and its copies. Raises HTTPException 422 for an invalid pool name."""
    first = _new_episode(body)
    yield first
    for number in range(2, body.copies + 1):
        yield msgspec.structs.replace(first, episode_uuid=f"{body.episode_uuid}#{number}")


def _new_episode(body: RegisterEpisodeRequest) -> NewEpisode:
    """Raises HTTPException 422 for an invalid pool name."""
    pool = body.client_uuid
    if "/" in pool:
        raise HTTPException(422, f"client_uuid: the name of a pool must not contain a slash, got {pool!r}")
    return NewEpisode(
        episode_uuid=body.episode_uuid,
        episode_type=body.episode_type,
        # Without a task id the episode is a group of its own.
        group_id=body.group_id or f"{pool}/{body.task_id or body.episode_uuid}",
        payload=json.dumps(body.payload, sort_keys=True).encode(),
        pool=pool,
        group_size=body.group_size or (body.copies if body.copies > 1 else 0),
    )


def _check_own_pool(new: NewEpisode) -> None:
    """Raises UnauthorizedError 403 for an episode that only the admin may register."""
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
