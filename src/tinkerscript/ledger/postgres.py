"""`PostgresLedger`: the ledger in a PostgreSQL schema, for servers that take over from each other.

A transaction is one message (simple query protocol), so a server suspended while sending it holds no lock,
and a pooler may switch sessions. Only batches over `MESSAGE_BYTES` take several.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
import psycopg
from psycopg import AsyncClientCursor, AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.ledger.compression import DICTIONARIES
from tinkerscript.ledger.database_lease import (
    LEASE_TABLE,
    LOST_LEASE,
    TIMEOUTS,
    Connection,
    DatabaseLease,
)
from tinkerscript.ledger.ledger import Ledger, Statement, WriteBatch
from tinkerscript.ledger.rows import (
    LEDGER_VERSION,
    TABLES,
    Row,
    column_types,
    columns,
    create_statements,
    on_conflict,
)

MESSAGE_BYTES = 8 * 2**20  # Approximate; the limit is 1 GiB.
CONNECT_S = 5
CLOSE_S = 2.0

MAX_NAME_BYTES = 63

VERSION = str(LEDGER_VERSION).encode()

# A retry would not cure these.
_FOR_GOOD = re.compile("authentication failed|no password supplied|does not exist|no pg_hba.conf entry")


_encode = msgspec.json.Encoder().encode


class PostgresLedger(Ledger):
    is_shared = True

    def __init__(self, url: str, folder: Path, *, durability: Literal["normal", "full"] = "normal") -> None:
        """Does not connect yet."""
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

    async def lead(self) -> int:
        async with self._explained():
            await self._open()
            assert self._lease is not None
            self._epoch = await self._lease.take()
        self._use_dictionaries(await self.read(DICTIONARIES))
        return self._epoch

    async def agree(self, name: str, value: bytes) -> bytes:
        async with self._explained():
            reading = await self._open()
            offer = self._text("INSERT INTO {s}facts VALUES (%s, %s) ON CONFLICT DO NOTHING")
            await reading.execute(offer, (name, value))
            agreed = await self._fact(reading, name)
            assert agreed is not None
            return agreed

    async def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        async with self._explained():
            reading = await self._open()
            async with reading.cursor(binary=True) as cursor:
                await cursor.execute(self._text(marked(sql)), [_escaped(each) for each in parameters])
                return [tuple(map(_unescaped, row)) for row in await cursor.fetchall()]

    async def write(self, batch: WriteBatch) -> None:
        if self._epoch is None:
            raise StoreError(f"{self._name}: nothing can be written before the lease is taken")
        messages = list(_messages(batch))
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

    def _message(self, statements: list[Statement], *, fenced: bool) -> tuple[bytes, list[Any]]:
        fence = [f"SELECT {{s}}fence({self._epoch})"] if fenced else []
        sql = ";\n".join([*fence, *(statement.sql for statement in statements)])
        return self._text(sql), [each for statement in statements for each in statement.parameters]

    async def release(self) -> None:
        if self._lease is not None and self._epoch is not None and not self._lost:
            limit = asyncio.get_running_loop().call_later(CLOSE_S, self._hang_up)
            with suppress(psycopg.Error):  # The lease expires by itself.
                await self._lease.release()
            limit.cancel()
        for connection in self._connections:
            await connection.close()

    async def _open(self) -> Connection:
        """Open three connections, so that long reads and writes do not delay the lease's renewals."""
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
                prepare_threshold=None,  # Poolers may switch sessions between transactions.
                connect_timeout=CONNECT_S,
                application_name="tinkerscript",
            )
        except psycopg.OperationalError as error:
            if _FOR_GOOD.search(str(error)):
                raise ConfigError(f"interchange_server.store: {self._name}: {error}") from error
            raise

    async def _create_tables(self, connection: Connection) -> None:
        async with connection.transaction():
            await connection.execute(TIMEOUTS)
            lock = b"SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"
            await connection.execute(lock, (f"tinkerscript {self._schema}",))
            # A role that may not create schemas can use an existing one.
            names = f"to_regnamespace('{self._schema}') IS NULL, to_regclass('{self._schema}.lease') IS NULL"
            cursor = await connection.execute(f"SELECT {names}".encode())
            lacks_schema, lacks_tables = await cursor.fetchone() or (False, False)
            if lacks_schema:
                await connection.execute(f"CREATE SCHEMA {self._schema}".encode())
            if lacks_tables:
                await connection.execute(LEASE_TABLE.replace("{schema}", self._schema).encode())
                for statement in create_statements(postgres=True):
                    await connection.execute(self._text(statement))
                version = self._text("INSERT INTO {s}facts VALUES ('version', %s)")
                await connection.execute(version, (VERSION,))
        version = (await self._fact(connection, "version") or b"unknown").decode()
        if version != VERSION.decode():
            raise ConfigError(
                f"interchange_server.store: {self._name} has version {version}, this tinkerscript reads "
                f"{VERSION.decode()}: use the version of tinkerscript that made it, or another schema"
            )

    async def _fact(self, connection: Connection, name: str) -> bytes | None:
        query = self._text("SELECT value FROM {s}facts WHERE name = %s")
        row = await (await connection.execute(query, (name,))).fetchone()
        return None if row is None else bytes(row[0])

    def _text(self, sql: str) -> bytes:
        return sql.replace("{s}", f"{self._schema}.").encode()

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
        self._lost = reason
        self._fail(StoreError(f"{self._name}: {reason}"))
        self._hang_up()

    def _hang_up(self) -> None:
        """Fail pending queries even if the database hangs."""
        for connection in self._connections:
            if not connection.closed:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)

    @asynccontextmanager
    async def _explained(self) -> AsyncGenerator[None]:
        try:
            yield
        except psycopg.Error as error:
            reason = self._lost or str(error).strip()
            if error.sqlstate == LOST_LEASE:
                self._lost = reason
            raise StoreError(f"{self._name}: {reason}") from error


def _messages(batch: WriteBatch) -> Iterator[list[Statement]]:
    message, size = list[Statement](), 0
    for kind in TABLES:
        part = list[bytes]()
        for row in batch.rows.get(kind, {}).values():
            part.append(_json(row))
            size += len(part[-1])
            if size > MESSAGE_BYTES:
                yield [*message, _insert(kind, part)]
                message, part, size = [], [], 0
        if part:
            message.append(_insert(kind, part))
    message += [
        Statement(marked(each.sql), tuple(map(_escaped, each.parameters))) for each in batch.statements
    ]
    if message:
        yield message


def _insert(kind: type[Row], rows: Iterable[bytes]) -> Statement:
    return Statement(_insert_of(kind), (f"[{b','.join(rows).decode()}]",))


@cache
def _insert_of(kind: type[Row]) -> str:
    names = ", ".join(columns(kind))
    rows = f"json_populate_recordset(NULL::{{s}}{kind.TABLE}, %s) WITH ORDINALITY"
    if kind.KEY:
        rows = f"json_populate_recordset(NULL::{{s}}{kind.TABLE}, %s)"
        return f"INSERT INTO {{s}}{kind.TABLE} ({names}) SELECT {names} FROM {rows}{on_conflict(kind)}"
    return f"INSERT INTO {{s}}{kind.TABLE} ({names}) SELECT {names} FROM {rows} ORDER BY ordinality"


def _json(row: Row) -> bytes:
    values = {name: getattr(row, name) for name in columns(type(row))}
    for name, (kind, _) in column_types(type(row)).items():
        if kind is bytes:
            values[name] = "\\x" + values[name].hex()
        elif kind is str:
            values[name] = _escaped(values[name])
    return _encode(values)


def marked(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")


_ESCAPES = str.maketrans({"\0": "\x010", "\x01": "\x011"})


def escaped(text: str) -> str:
    """Escape U+0000, which PostgreSQL cannot store."""
    return text.translate(_ESCAPES) if "\0" in text or "\x01" in text else text


def unescaped(text: str) -> str:
    return text.replace("\x010", "\0").replace("\x011", "\x01") if "\x01" in text else text


def _escaped(value: Any) -> Any:
    return escaped(value) if isinstance(value, str) else value


def _unescaped(value: Any) -> Any:
    if isinstance(value, str):
        return unescaped(value)
    return bytes(value) if isinstance(value, memoryview) else value


def split_url(url: str, folder: Path) -> tuple[str, str]:
    """Split off the schema that `?schema=NAME` names or the folder implies."""
    parts = urlsplit(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    named = [value for name, value in query if name == "schema"]
    rest = urlencode([(name, value) for name, value in query if name != "schema"], quote_via=quote)
    if not named:
        return parts._replace(query=rest).geturl(), _schema_of(folder)
    if len(named) > 1 or not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,62}", named[0]):
        raise ConfigError(
            f"interchange_server.store: schema={named[-1]} is not the name of a schema: use one of at most "
            f"{MAX_NAME_BYTES} lowercase letters, digits and underscores that does not begin with pg_"
        )
    return parts._replace(query=rest).geturl(), named[0]


def _schema_of(folder: Path) -> str:
    name = folder.absolute().name
    plain = re.sub(r"[^a-z0-9_]", "_", name.lower())[:40]
    if plain != name:
        plain += "_" + hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"tinkerscript_{plain}"


def _named(conninfo: str) -> str:
    try:
        parts = conninfo_to_dict(conninfo)
    except psycopg.Error as error:
        raise ConfigError(f"interchange_server.store: {str(error).strip()}") from error
    host, port = parts.get("host", "localhost"), parts.get("port", 5432)
    return f"{parts.get('dbname', '')} at {host}:{port}"
