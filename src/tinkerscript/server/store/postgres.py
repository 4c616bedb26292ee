"""`PostgresStore`: a run's episodes in a PostgreSQL database, for servers that replace each other.

Each transaction is one message (PostgreSQL's simple query protocol), so a server that is stopped while it
sends one holds no lock, and a pooler may give each transaction another session. Only batches beyond
`MESSAGE_BYTES` take several messages. Invariants: a batch is written only if the lease's epoch is this
server's (`database_lease`); a server that loses the lease, or the database, writes and reads nothing more. A
commit survives a crash of the database, and of its machine where the database syncs its log.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec
import psycopg
from psycopg import AsyncClientCursor, AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.lifecycle import without_garbage_collection
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.database_lease import LOST_LEASE, TIMEOUTS, Connection, DatabaseLease
from tinkerscript.server.store.episode_store import EpisodeStore, WriteBatch
from tinkerscript.server.store.postgres_schema import (
    LOAD,
    PAGE,
    POSTGRES_VERSION,
    READ_CALLS,
    TABLES,
    Statement,
    episode_of,
    escaped,
    split_url,
    statements,
    unescaped,
)
from tinkerscript.trainer_link.messages import RecordedOutcome

MESSAGE_BYTES = 8 * 2**20
"""Approximate size of the rows in one message; PostgreSQL takes no message of 1 GiB."""

CONNECT_S = 5
"""Seconds that a connection may take."""

CLOSE_S = 2.0
"""Seconds for releasing the lease."""

_FOR_GOOD = re.compile("authentication failed|no password supplied|does not exist|no pg_hba.conf entry")
"""In the message of a connection that will not be accepted later either."""

_decode_call = msgspec.msgpack.Decoder(Call).decode


class PostgresStore(EpisodeStore):
    """One schema. `lead` before anything is written; `EpisodeStore` says what shares a transaction."""

    is_shared = True

    def __init__(self, url: str, folder: Path, *, durability: Literal["normal", "full"] = "normal") -> None:
        """Connects to nothing yet. Raises ConfigError for a URL that cannot be one of a database."""
        super().__init__()
        self._conninfo, self._schema = split_url(url, folder)
        self._name = f"database {_named(self._conninfo)}, schema {self._schema}"
        self._durability = durability
        self._holder = f"{socket.gethostname()}:{os.getpid()} {folder.absolute()}"
        self._connections: list[Connection] = []
        self._opening = asyncio.Lock()
        self._lease: DatabaseLease | None = None
        self._epoch: int | None = None
        self._lost = ""
        """Why this server no longer leads."""

    async def lead(self) -> int:
        async with self._explained():
            await self._open()
            assert self._lease is not None
            self._epoch = await self._lease.take()
            return self._epoch

    async def agree(self, name: str, value: bytes) -> bytes:
        async with self._explained():
            reading = await self._open()
            offer = self._text("INSERT INTO {schema}.shared_values VALUES (%s, %s) ON CONFLICT DO NOTHING")
            await reading.execute(offer, (name, value))
            agreed = await self._shared_value(reading, name)
            assert agreed is not None
            return agreed

    async def load(self) -> list[EpisodeRecord]:
        found: list[EpisodeRecord] = []
        async with self._explained():
            reading = await self._open()
            async with reading.cursor(binary=True) as cursor:
                while True:
                    await cursor.execute(self._text(LOAD), (found[-1].sequence if found else -1,))
                    rows = await cursor.fetchall()
                    with without_garbage_collection():  # All of it stays: a third less of time.
                        found += map(episode_of, rows)
                    if len(rows) < PAGE:
                        return found

    async def calls(self, claims: Sequence[tuple[EpisodeRecord, int]]) -> list[list[Call]]:
        wanted = [(episode.sequence, attempt) for episode, attempt in claims]
        found: dict[tuple[int, int], list[Call]] = {each: [] for each in wanted}
        async with self._explained():
            reading = await self._open()
            async with reading.cursor(binary=True) as cursor:
                sequences, attempts = zip(*wanted, strict=True) if wanted else ((), ())
                await cursor.execute(self._text(READ_CALLS), (list(sequences), list(attempts)))
                async for sequence, attempt, call in cursor:
                    found[sequence, attempt].append(_decode_call(call))
        return [found[each] for each in wanted]

    async def transcribed(self, episodes: Sequence[EpisodeRecord]) -> set[str]:
        uuids = {episode.sequence: episode.uuid for episode in episodes}
        async with self._explained():
            reading = await self._open()
            query = self._text("SELECT DISTINCT sequence FROM {schema}.transcripts WHERE sequence = ANY(%s)")
            cursor = await reading.execute(query, (list(uuids),))
            return {uuids[sequence] for (sequence,) in await cursor.fetchall()}

    async def transcripts(self, episode: EpisodeRecord) -> dict[int, bytes]:
        async with self._explained():
            reading = await self._open()
            async with reading.cursor(binary=True) as cursor:
                query = "SELECT attempt, transcript FROM {schema}.transcripts WHERE sequence = %s"
                await cursor.execute(self._text(query), (episode.sequence,))
                return dict(await cursor.fetchall())

    async def outcomes(self, episode_uuids: Sequence[str]) -> dict[str, RecordedOutcome]:
        async with self._explained():
            reading = await self._open()
            query = self._text("SELECT uuid, state, acknowledged FROM {schema}.episodes WHERE uuid = ANY(%s)")
            cursor = await reading.execute(query, ([escaped(uuid) for uuid in episode_uuids],))
            rows = await cursor.fetchall()
        return {unescaped(uuid): RecordedOutcome(state, done) for uuid, state, done in rows}

    async def write(self, batch: WriteBatch) -> None:
        if self._epoch is None:
            raise StoreError(f"{self._name}: nothing can be written before the lease is taken")
        messages = _messages(statements(batch))
        async with self._explained():
            await self._open()
            writing = self._connections[1]
            async with AsyncClientCursor(writing) as cursor:
                if len(messages) == 1:
                    await cursor.execute(*self._message(messages[0], fenced=True))
                    return
                async with writing.transaction():
                    for number, message in enumerate(messages):
                        await cursor.execute(*self._message(message, fenced=number == 0))

    def _message(self, statements: list[Statement], *, fenced: bool) -> tuple[bytes, list[str]]:
        """SQL and parameters of one message, a transaction by itself unless one is open."""
        fence = [f"SELECT {{schema}}.fence({self._epoch})"] if fenced else []
        sql = ";\n".join([*fence, *(statement.sql for statement in statements)])
        return self._text(sql), [f"[{b','.join(each.rows).decode()}]" for each in statements]

    async def release(self) -> None:
        if self._lease is not None and self._epoch is not None and not self._lost:
            limit = asyncio.get_running_loop().call_later(CLOSE_S, self._hang_up)
            with suppress(psycopg.Error):  # Then it runs out.
                await self._lease.release()
            limit.cancel()
        for connection in self._connections:
            await connection.close()

    async def _open(self) -> Connection:
        """The connection that reads. Connects, and creates what all servers share, the first time.

        There are three, so that neither long reads nor long writes delay the renewals of the lease.
        """
        if self._lost:
            raise StoreError(f"{self._name}: {self._lost}")
        async with self._opening:
            while len(self._connections) < 3:
                self._connections.append(await self._connect())
            if self._lease is None:
                connection = self._connections[0]
                await self._check_durability(connection)
                await self._create_tables(connection)
                self._lease = DatabaseLease(
                    connection, self._schema, holder=self._holder, lost=self._step_down
                )
        return self._connections[2]

    async def _connect(self) -> Connection:
        try:
            return await AsyncConnection.connect(
                self._conninfo,
                autocommit=True,
                prepare_threshold=None,  # A pooler may give the next transaction another session.
                connect_timeout=CONNECT_S,
                application_name="tinkerscript",
            )
        except psycopg.OperationalError as error:
            if _FOR_GOOD.search(str(error)):
                raise ConfigError(f"interchange_server.store: {self._name}: {error}") from error
            raise

    async def _create_tables(self, connection: Connection) -> None:
        """Create the run's schema, unless it is there. Raises ConfigError for one of another version."""
        async with connection.transaction():
            await connection.execute(TIMEOUTS)
            # Held until the end of this transaction: two servers may start at once.
            lock = b"SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
            await connection.execute(lock, (f"tinkerscript {self._schema}",))
            # A role without the right to create schemas can use one that is there.
            cursor = await connection.execute(
                self._text(
                    "SELECT to_regnamespace('{schema}') IS NULL, to_regclass('{schema}.lease') IS NULL"
                )
            )
            lacks_schema, lacks_tables = await cursor.fetchone() or (False, False)
            if lacks_schema:
                await connection.execute(self._text("CREATE SCHEMA {schema}"))
            if lacks_tables:
                await connection.execute(self._text(TABLES))
        version = (await self._shared_value(connection, "schema_version") or b"unknown").decode()
        if version != POSTGRES_VERSION:
            raise ConfigError(
                f"interchange_server.store: {self._name} has schema version {version}, this server reads "
                f"{POSTGRES_VERSION}: use the version of tinkerscript that made it, or another schema"
            )

    async def _shared_value(self, connection: Connection, name: str) -> bytes | None:
        query = self._text("SELECT value FROM {schema}.shared_values WHERE name = %s")
        row = await (await connection.execute(query, (name,))).fetchone()
        return None if row is None else bytes(row[0])

    def _text(self, sql: str) -> bytes:
        """A statement for this run's schema."""
        return sql.format(schema=self._schema).encode()

    async def _check_durability(self, connection: Connection) -> None:
        cursor = await connection.execute(
            "SELECT current_setting('synchronous_commit'), current_setting('fsync')"
        )
        waits, syncs = await cursor.fetchone() or ("", "")
        if waits == "off":
            raise ConfigError(
                f"{self._name}: synchronous_commit is off, so a crash would lose results that were "
                "confirmed; turn it on for this role or database"
            )
        if self._durability == "full" and syncs == "off":
            raise ConfigError(
                f"{self._name}: fsync is off, and interchange_server.durability is full: turn fsync on"
            )

    def _step_down(self, reason: str) -> None:
        """The lease is lost: wake all who wait for the database, and let nobody ask it again."""
        self._lost = reason
        self._fail(StoreError(f"{self._name}: {reason}"))
        self._hang_up()

    def _hang_up(self) -> None:
        """Make what waits for the database fail at once, whatever the database does."""
        for connection in self._connections:
            if not connection.closed:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    @asynccontextmanager
    async def _explained(self) -> AsyncGenerator[None]:
        """PostgreSQL's errors as a StoreError. One that says that the lease is lost loses it here too."""
        try:
            yield
        except psycopg.Error as error:
            reason = self._lost or str(error).strip()
            if error.sqlstate == LOST_LEASE:
                self._lost = reason
            raise StoreError(f"{self._name}: {reason}") from error


def _messages(statements: Iterable[Statement]) -> list[list[Statement]]:
    """The same in messages of about `MESSAGE_BYTES`; a statement with many rows becomes several."""
    messages, size = list[list[Statement]]([[]]), 0
    for statement in statements:
        part = Statement(statement.sql, [])
        messages[-1].append(part)
        for row in statement.rows:
            if size and size + len(row) > MESSAGE_BYTES:
                part, size = Statement(statement.sql, []), 0
                messages.append([part])
            part.rows.append(row)
            size += len(row)
    return messages


def _named(conninfo: str) -> str:
    """The database without its password. Raises ConfigError for what is no URL of one."""
    try:
        parts = conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise ConfigError(f"interchange_server.store: {str(error).strip()}") from error
    host, port = parts.get("host", "localhost"), parts.get("port", 5432)
    return f"{parts.get('dbname', '')} at {host}:{port}"
