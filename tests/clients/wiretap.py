"""`Wiretap`: a plain TCP relay between a client and the server that keeps a copy of what the client sends.

The bytes pass unchanged; the copy is read as HTTP afterwards, to tell which fields a client sends.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

CHUNK = 1 << 16


@dataclass
class Request:
    """One HTTP request of a client."""

    path: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


class _Parser:
    """httptools' callbacks for the requests of one connection."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.requests.append(Request())

    def on_url(self, url: bytes) -> None:
        self.requests[-1].path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.requests[-1].headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.requests[-1].body += body


class Wiretap:
    """Listens on a free port of this machine while its context is open."""

    def __init__(self, target: str) -> None:
        """`target` is the server's URL."""
        parts = urlsplit(target)
        self._host, self._port = parts.hostname, parts.port
        self._connections: list[_Parser] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """Forget what was sent so far."""
        self._connections.clear()

    @property
    def requests(self) -> list[Request]:
        """What was sent since the last reset; in order within a connection."""
        return [request for connection in self._connections for request in connection.requests]

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        copy = _Parser()
        self._connections.append(copy)
        server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, server_writer, copy))
            group.create_task(_pump(server_reader, writer, None))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copy: _Parser | None) -> None:
    """Carry bytes until the sender ends or the receiver is gone."""
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            if copy is not None:
                copy.feed(data)
            writer.write(data)
            await writer.drain()
    writer.close()
