"""`PostgresStore`: a run's episodes in a PostgreSQL database, for servers that replace each other.

Each transaction is one message (PostgreSQL's simple query protocol), so a server that is stopped while it
sends one holds no lock, and a pooler may give each transaction another session. Only batches beyond
`MESSAGE_BYTES` take several messages. Invariants: a batch is written only if the lease's epoch is this
server's (`database_lease`); who loses the lease, or the database, writes and reads nothing more. A commit
survives a crash of the database, and of its machine where the database syncs its log.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import psycopg
from psycopg import AsyncClientCursor, AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.store.database_lease import Connection, DatabaseLease
from tinkerscript.server.store.episode_copy import PROGRESS, EpisodeCopy, with_texts
from tinkerscript.server.store.episode_store import EpisodeStore, WriteBatch
from tinkerscript.server.store.postgres_schema import LOST_LEASE, escaped, split_url, unescaped
from tinkerscript.trainer_link.messages import RecordedOutcome

MESSAGE_BYTES = 8 * 2**20
"""Of the rows that one message carries, about; PostgreSQL takes no message of 1 GiB."""

CONNECT_S = 5
"""Seconds that a connection may take."""

GOODBYE_S = 2.0
"""Seconds for releasing the lease."""

_FOR_GOOD = re.compile("authentication failed|no password supplied|does not exist|no pg_hba.conf entry")
"""In the message of a connection that will not be accepted later either."""

_encode = msgspec.json.Encoder().encode
_encode_call = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(Call).decode


class _Statement(NamedTuple):
    """One statement of a transaction; its only parameter is a JSON array of rows."""

    sql: str
    rows: list[bytes]
    """Each in JSON."""


class PostgresStore(EpisodeStore):
    """One schema. `lead` before anything is written; `EpisodeStore` says what shares a transaction."""

    is_shared = True

    def __init__(
        self, url: str, folder: Path, *, durability: Literal["normal", "full"] = "normal", holder: str = ""
    ) -> None:
        """Connects to nothing yet. `holder` names this server to people who look at the lease.

        Raises ConfigError for a URL that cannot be one of a database.
        """
        super().__init__()
        self._conninfo, self._schema = split_url(url, folder)
        self._name = f"database {_named(self._conninfo)}, schema {self._schema}"
        self._durability = durability
        self._holder = holder or f"{socket.gethostname()}:{os.getpid()} {folder.absolute()}"
        self._sql = _Sql(self._schema)
        self._copy = EpisodeCopy(self._schema)
        self._connections: list[Connection] = []
        self._opening = asyncio.Lock()
        self._lease: DatabaseLease | None = None
        self._epoch: int | None = None
        self._lost = ""
        """Why this server no longer leads."""

    async def lead(self) -> int:
        async with self._explained():
            reading = await self._open()
            assert self._lease is not None
            async with self._copy.follow(reading):
                self._epoch = await self._lease.take()
            return self._epoch

    async def agree(self, name: str, value: bytes) -> bytes:
        async with self._explained():
            reading = await self._open()
            await reading.execute(self._sql.offer, (name, value))
            row = await (await reading.execute(self._sql.agreed, (name,))).fetchone()
            return bytes(row[0]) if row is not None else value

    async def load(self) -> list[EpisodeRecord]:
        async with self._explained():
            await self._copy.refresh(await self._open())
        return self._copy.take()

    async def calls(self, claims: Sequence[tuple[EpisodeRecord, int]]) -> list[list[Call]]:
        wanted = [(episode.sequence, attempt) for episode, attempt in claims]
        found: dict[tuple[int, int], list[Call]] = {each: [] for each in wanted}
        async with self._explained():
            reading = await self._open()
            async with reading.cursor(binary=True) as cursor:
                sequences, attempts = zip(*wanted, strict=True) if wanted else ((), ())
                await cursor.execute(self._sql.calls, (list(sequences), list(attempts)))
                async for sequence, attempt, call in cursor:
                    found[sequence, attempt].append(_decode_call(call))
        return [found[each] for each in wanted]

    async def transcribed(self, episodes: Sequence[EpisodeRecord]) -> set[str]:
        uuids = {episode.sequence: episode.uuid for episode in episodes}
        async with self._explained():
            reading = await self._open()
            cursor = await reading.execute(self._sql.transcribed, (list(uuids),))
            return {uuids[sequence] for (sequence,) in await cursor.fetchall()}

    async def transcripts(self, episode: EpisodeRecord) -> dict[int, bytes]:
        async with self._explained():
            reading = await self._open()
            async with reading.cursor(binary=True) as cursor:
                await cursor.execute(self._sql.transcripts, (episode.sequence,))
                return dict(await cursor.fetchall())

    async def outcomes(self, episode_uuids: Sequence[str]) -> dict[str, RecordedOutcome]:
        async with self._explained():
            reading = await self._open()
            cursor = await reading.execute(self._sql.outcomes, ([escaped(uuid) for uuid in episode_uuids],))
            rows = await cursor.fetchall()
        return {unescaped(uuid): RecordedOutcome(state, done) for uuid, state, done in rows}

    async def write(self, batch: WriteBatch) -> None:
        if self._epoch is None:
            raise StoreError(f"{self._name}: nothing can be written before the lease is taken")
        messages = _messages(self._sql.statements(batch))
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

    def _message(self, statements: list[_Statement], *, fenced: bool) -> tuple[bytes, list[str]]:
        """SQL and parameters of one message, a transaction by itself unless one is open."""
        fence = [f"SELECT {self._schema}.fence({self._epoch})"] if fenced else []
        sql = ";\n".join([*fence, *(statement.sql for statement in statements)])
        return sql.encode(), [f"[{b','.join(each.rows).decode()}]" for each in statements]

    async def release(self) -> None:
        if self._lease is not None and self._epoch is not None and not self._lost:
            limit = asyncio.get_running_loop().call_later(GOODBYE_S, self._hang_up)
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
                await self._check_durability(self._connections[0])
                lease = DatabaseLease(
                    self._connections[0], self._schema, holder=self._holder, lost=self._step_down
                )
                await lease.create()
                self._lease = lease
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


class _Sql:
    """The statements of one schema."""

    def __init__(self, schema: str) -> None:
        episodes, types = f"{schema}.episodes", "sequence bigint, attempt integer"
        self.offer = f"INSERT INTO {schema}.shared_values VALUES (%s, %s) ON CONFLICT DO NOTHING".encode()
        self.agreed = f"SELECT value FROM {schema}.shared_values WHERE name = %s".encode()
        self.calls = (
            f"SELECT sequence, attempt, call FROM {schema}.calls JOIN unnest(%s::bigint[], %s::integer[]) "
            "AS wanted (sequence, attempt) USING (sequence, attempt) ORDER BY number"
        ).encode()
        self.outcomes = f"SELECT uuid, state, acknowledged FROM {episodes} WHERE uuid = ANY(%s)".encode()
        self.transcribed = (
            f"SELECT DISTINCT sequence FROM {schema}.transcripts WHERE sequence = ANY(%s)"
        ).encode()
        self.transcripts = (
            f"SELECT attempt, transcript FROM {schema}.transcripts WHERE sequence = %s"
        ).encode()
        rows = f"json_populate_recordset(NULL::{episodes}, %s)"
        event = (
            f"INSERT INTO {schema}.events "
            "(sequence, state, attempt, client_uuid, policy_version, reward, failure, acknowledged) "
            "SELECT sequence, state, json_array_length(claimants), coalesce(claimants ->> -1, ''), "
            "policy_version, reward, failures -> -1, acknowledged FROM changed ORDER BY sequence"
        )
        self._insert = f"WITH changed AS (INSERT INTO {episodes} SELECT * FROM {rows} RETURNING *) {event}"
        changes = ", ".join(f"{name} = new.{name}" for name in PROGRESS)
        self._update = (
            f"WITH changed AS (UPDATE {episodes} AS e SET {changes} FROM {rows} AS new "
            f"WHERE e.sequence = new.sequence RETURNING e.*) {event}"
        )
        self._payloads = (
            f"INSERT INTO {schema}.payloads SELECT sequence, decode(data, 'base64') "
            "FROM json_to_recordset(%s) AS new (sequence bigint, data text)"
        )
        self._results = (
            f"INSERT INTO {schema}.results SELECT sequence, decode(data, 'base64') "
            "FROM json_to_recordset(%s) AS new (sequence bigint, data text) "
            "ON CONFLICT (sequence) DO UPDATE SET result = excluded.result"
        )
        self._calls = (
            f"INSERT INTO {schema}.calls (sequence, attempt, call) "
            "SELECT sequence, attempt, decode(data, 'base64') "
            f"FROM json_to_recordset(%s) AS new ({types}, place bigint, data text) ORDER BY place"
        )
        self._transcripts = (
            f"INSERT INTO {schema}.transcripts SELECT sequence, attempt, decode(data, 'base64') "
            f"FROM json_to_recordset(%s) AS new ({types}, data text) "
            "ON CONFLICT (sequence, attempt) DO UPDATE SET transcript = excluded.transcript"
        )
        self._drop = (
            f"DELETE FROM {schema}.calls AS c USING json_to_recordset(%s) AS old ({types}) "
            "WHERE c.sequence = old.sequence AND c.attempt = old.attempt"
        )
        self._forget = (
            "WITH old AS (SELECT * FROM json_to_recordset(%s) AS old (sequence bigint)), "
            f"p AS (DELETE FROM {schema}.payloads AS t USING old WHERE t.sequence = old.sequence), "
            f"r AS (DELETE FROM {schema}.results AS t USING old WHERE t.sequence = old.sequence), "
            f"s AS (DELETE FROM {schema}.transcripts AS t USING old WHERE t.sequence = old.sequence) "
            f"DELETE FROM {schema}.calls AS t USING old WHERE t.sequence = old.sequence"
        )

    def statements(self, batch: WriteBatch) -> Iterator[_Statement]:
        """The statements of a transaction that have rows, in their order."""
        new = batch.added.values()
        changed = [each for uuid, each in batch.saved.items() if uuid not in batch.added]
        place = count()
        over = [_encode({"sequence": each.sequence}) for each in (*new, *changed) if each.acknowledged]
        statements = [
            _Statement(self._insert, [_encode(_identity(each) | _progress(each)) for each in new]),
            _Statement(self._payloads, [_blob(each.payload, sequence=each.sequence) for each in new]),
            _Statement(
                self._update, [_encode(_progress(each) | {"sequence": each.sequence}) for each in changed]
            ),
            _Statement(
                self._results,
                [
                    _blob(each.result, sequence=each.sequence)
                    for each in (*new, *changed)
                    if each.state == "ended"
                ],
            ),
            _Statement(
                self._calls,
                [
                    _blob(_encode_call(call), sequence=each.sequence, attempt=attempt, place=next(place))
                    for each, attempt, call in batch.calls
                ],
            ),
            _Statement(
                self._transcripts,
                [
                    _blob(data, sequence=sequence, attempt=attempt)
                    for (sequence, attempt), data in _latest(batch).items()
                ],
            ),
            _Statement(
                self._drop,
                [_encode({"sequence": each.sequence, "attempt": attempt}) for each, attempt in batch.dropped],
            ),
            _Statement(self._forget, over),
        ]
        return (statement for statement in statements if statement.rows)


def _latest(batch: WriteBatch) -> dict[tuple[int, int], bytes]:
    """One transcript of each claim: PostgreSQL replaces no row twice in a statement."""
    return {(each.sequence, attempt): data for each, attempt, data in batch.transcripts}


def _messages(statements: Iterable[_Statement]) -> list[list[_Statement]]:
    """The same in messages of about `MESSAGE_BYTES`; a statement with many rows becomes several."""
    messages, size = list[list[_Statement]]([[]]), 0
    for statement in statements:
        part = _Statement(statement.sql, [])
        messages[-1].append(part)
        for row in statement.rows:
            if size and size + len(row) > MESSAGE_BYTES:
                part, size = _Statement(statement.sql, []), 0
                messages.append([part])
            part.rows.append(row)
            size += len(row)
    return messages


def _blob(data: bytes, **key: int) -> bytes:
    return _encode(key | {"data": base64.b64encode(data).decode()})


def _identity(episode: EpisodeRecord) -> dict[str, Any]:
    return {
        "sequence": episode.sequence,
        "uuid": escaped(episode.uuid),
        "episode_type": episode.episode_type,
        "group_id": escaped(episode.group_id),
        "digest": _hex(episode.digest),
        "pool": escaped(episode.pool),
        "group_size": episode.group_size,
    }


def _progress(episode: EpisodeRecord) -> dict[str, Any]:
    return {
        "state": episode.state,
        "claimants": [escaped(name) for name in episode.claimants],
        "request_ids": [escaped(name) for name in episode.request_ids],
        "forgiven": episode.forgiven,
        "lease_s": episode.lease_s,
        "claimed_at": episode.claimed_at,
        "policy_version": episode.policy_version,
        "reward": episode.reward,
        "result_digest": _hex(episode.result_digest),
        "failures": [with_texts(each, escaped) for each in episode.failures],
        "offered": episode.offered,
        "acknowledged": episode.acknowledged,
        "dropped": episode.dropped,
    }


def _hex(data: bytes) -> str:
    return "\\x" + data.hex()


def _named(conninfo: str) -> str:
    """The database without its password. Raises ConfigError for what is no URL of one."""
    try:
        parts = conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise ConfigError(f"interchange_server.store: {str(error).strip()}") from error
    host, port = parts.get("host", "localhost"), parts.get("port", 5432)
    return f"{parts.get('dbname', '')} at {host}:{port}"
