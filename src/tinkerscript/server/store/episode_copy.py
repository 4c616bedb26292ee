"""`EpisodeCopy`: the episodes in PostgreSQL, as far as a server has read them.

A server that waits for the lease reads ahead, so that it has little left to read when it takes over.
Invariant: after a `refresh` that nobody wrote during, the copy is what the database has. Writers make it so:
one server writes at a time, a transaction after the other, and each change of an episode adds a row to
`events`, so the numbers of the committed events only grow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psycopg
from psycopg import AsyncConnection
from pydantic import TypeAdapter

from tinkerscript.lifecycle import without_garbage_collection
from tinkerscript.protocol import Failure
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.postgres_schema import unescaped

PAGE = 5000
"""Episodes that are read at once."""

REFRESH_S = 1.0
"""Seconds between two refreshes of a server that waits."""

_IDENTITY = ("sequence", "uuid", "episode_type", "group_id", "digest", "pool", "group_size")

PROGRESS = (
    *("state", "claimants", "request_ids", "forgiven", "lease_s", "claimed_at", "policy_version"),
    *("reward", "result_digest", "failures", "offered", "acknowledged", "dropped"),
)
"""Columns that change after an episode was registered."""

_COLUMNS = _IDENTITY + PROGRESS
_TEXTS = ("claimants", "request_ids", "failures")

_failures = TypeAdapter(list[Failure])
_decode_names = msgspec.json.Decoder(list[str]).decode

logger = logging.getLogger(__name__)


class EpisodeCopy:
    """Reads by one connection. Raises psycopg.Error; afterwards it can be refreshed again."""

    def __init__(self, schema: str) -> None:
        columns = ", ".join(f"{name}::text" if name in _TEXTS else name for name in _COLUMNS)
        rows = (
            f"SELECT {columns}, payload, result FROM {schema}.episodes "
            f"LEFT JOIN {schema}.payloads USING (sequence) LEFT JOIN {schema}.results USING (sequence) "
        )
        self._newest = f"SELECT coalesce(max(number), 0) FROM {schema}.events".encode()
        self._all = f"{rows} WHERE sequence > %s ORDER BY sequence LIMIT {PAGE}".encode()
        self._changed = (
            f"{rows} WHERE sequence > %s AND sequence IN "
            f"(SELECT sequence FROM {schema}.events WHERE number > %s) ORDER BY sequence LIMIT {PAGE}"
        ).encode()
        self._episodes: dict[int, EpisodeRecord] = {}
        """By sequence, in its order."""

        self._seen: int | None = None
        """The number of an event: the copy has what that one and those before have changed."""

    def take(self) -> list[EpisodeRecord]:
        """The episodes in order of registration; the copy is empty afterwards."""
        taken = list(self._episodes.values())
        self._episodes, self._seen = {}, None
        return taken

    async def refresh(self, connection: AsyncConnection[tuple[Any, ...]]) -> None:
        """Read what is new. If it is cancelled, the next one goes on from there."""
        newest = await self._number(connection)
        if self._seen is None:
            self._seen = newest
        await self._read(connection, self._all, next(reversed(self._episodes), -1))
        if self._seen < newest:
            await self._read(connection, self._changed, -1, self._seen)
            self._seen = newest

    @asynccontextmanager
    async def follow(self, connection: AsyncConnection[tuple[Any, ...]]) -> AsyncGenerator[None]:
        """Refresh again and again inside the block. What fails meanwhile is read by the next `refresh`."""
        following = asyncio.create_task(self._follow(connection))
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, connection: AsyncConnection[tuple[Any, ...]]) -> None:
        while True:
            try:
                await self.refresh(connection)
            except psycopg.Error as error:  # No tables yet, or those of another version.
                logger.debug("store.read_ahead_failed reason=%s", error)
            await asyncio.sleep(REFRESH_S)

    async def _number(self, connection: AsyncConnection[tuple[Any, ...]]) -> int:
        row = await (await connection.execute(self._newest)).fetchone()
        assert row is not None
        return int(row[0])

    async def _read(
        self, connection: AsyncConnection[tuple[Any, ...]], query: bytes, after: int, *rest: int
    ) -> None:
        """Page by page, beginning after this sequence."""
        while True:
            async with connection.cursor(binary=True) as cursor:
                await cursor.execute(query, (after, *rest))
                rows = await cursor.fetchall()
            with without_garbage_collection():  # Everything that is made stays.
                for episode in map(_episode, rows):
                    self._episodes[episode.sequence] = episode
                    after = episode.sequence
            if len(rows) < PAGE:
                return


def with_texts(failure: Failure, change: Callable[[str], str]) -> dict[str, Any]:
    """A failure as JSON, with each text changed."""
    fields = failure.model_dump(mode="json")
    return {name: change(value) if isinstance(value, str) else value for name, value in fields.items()}


def _episode(row: tuple[Any, ...]) -> EpisodeRecord:
    fields = dict(zip((*_COLUMNS, "payload", "result"), row, strict=True))
    for name in ("uuid", "group_id", "pool"):
        fields[name] = unescaped(fields[name])
    for name in ("claimants", "request_ids"):
        fields[name] = _names_in(fields[name])
    for name in ("payload", "result"):
        fields[name] = fields[name] or b""
    fields["failures"] = _failures_in(fields["failures"])
    return EpisodeRecord(**fields)


def _names_in(text: str) -> list[str]:
    names = _decode_names(text) if text != "[]" else []
    return [unescaped(name) for name in names] if "\\u0001" in text else names


def _failures_in(text: str) -> list[Failure]:
    failures = _failures.validate_json(text) if text != "[]" else []
    return [Failure(**with_texts(each, unescaped)) for each in failures] if "\\u0001" in text else failures
