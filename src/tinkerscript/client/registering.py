"""Registering: the episodes of one group, from a client's own samples, into a pool of its own. No I/O.

Invariant: the uuids follow from the pool, the task id, the round and the place in the group, so that a group
registered again, by this process or the next, is the same group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from uuid import UUID, uuid5

from pydantic import JsonValue

from tinkerscript.client.exchange import Done, Exchange, HttpRequest, Timing, Wait, post
from tinkerscript.client.settings import ClientSettings
from tinkerscript.errors import RequestRefusedError
from tinkerscript.protocol import (
    MAX_ID_CHARS,
    EpisodeType,
    RegisterEpisodeRequest,
    RegisterEpisodeResponse,
)

NAMESPACE = UUID("8e2c4d0e-6f0b-5c53-9d0a-0f5f1f1a7c11")
"""Of the uuids that clients derive."""


def episode_uuids(pool: str, task_id: str, group_size: int, round: str) -> list[str]:
    """The uuids of a group's episodes, in order."""
    names = (json.dumps([pool, task_id, round, index]) for index in range(group_size))
    return [str(uuid5(NAMESPACE, name)) for name in names]


class RegisterExchange(Exchange[list[str]]):
    """Register the episodes of a group one after the other; the value is their uuids."""

    def __init__(
        self,
        settings: ClientSettings,
        payload: Mapping[str, JsonValue],
        *,
        task_id: str,
        group_size: int,
        episode_type: EpisodeType,
        round: str,
        timing: Timing,
    ) -> None:
        """Raises ValueError for an empty or long task id, or a group size below 1."""
        named = f"{task_id}#{round}" if round else task_id
        if not task_id or len(named) > MAX_ID_CHARS:
            raise ValueError(
                f"task_id (with its round) must have 1 to {MAX_ID_CHARS} characters, got {named!r}"
            )
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self._message = RegisterEpisodeRequest(
            episode_uuid="-",
            client_uuid=settings.client_uuid,
            episode_type=episode_type,
            task_id=named,
            group_size=group_size,
            payload=dict(payload),
        )
        self._uuids = episode_uuids(settings.client_uuid, task_id, group_size, round)
        self._registered = 0
        super().__init__(self._next(), self._read_one, timeout_s=settings.timeout_s, timing=timing)

    def accept(self, value: list[str]) -> Done[list[str]] | Wait:
        self._registered += 1
        if self._registered == len(self._uuids):
            return Done(value)
        self.request = self._next()
        return Wait(0.0)

    def _next(self) -> HttpRequest:
        uuid = self._uuids[self._registered]
        return post("/register_episode", self._message.model_copy(update={"episode_uuid": uuid}))

    def _read_one(self, body: bytes) -> list[str]:
        reply = RegisterEpisodeResponse.model_validate_json(body)
        if not reply.success:
            raise RequestRefusedError(200, reply.failure_reason or "the server gave no reason")
        return self._uuids
