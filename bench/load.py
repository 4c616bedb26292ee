"""A light HTTP/1.1 load generator: keep-alive connections that each send one request after the other.

Light, so that the server under load gets a core of its own: no client library, no header parsing beyond the
status and the length. For a server on this machine that answers with `Content-Length`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast


class Keyed(NamedTuple):
    """A body that goes under a key of its own."""

    body: bytes
    key: str


Body = bytes | Keyed


@dataclass(slots=True)
class Load:
    """What one load measured."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list[float])
    replies: list[bytes] = field(default_factory=list[bytes])


class Connection(asyncio.Protocol):
    """One connection; `ask` returns the body of a 200 reply."""

    def __init__(self) -> None:
        self._host = ""
        self._buffer = b""
        self._reply: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass.
        self._host = "{}:{}".format(*transport.get_extra_info("peername"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply and not self._reply.done():
            self._reply.set_exception(exc or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return
        assert self._reply is not None
        self._buffer = b""
        if b" 200 " in head.split(b"\r\n", 1)[0]:
            self._reply.set_result(rest)
        else:
            self._reply.set_exception(RuntimeError(f"{head.decode()}\n{rest.decode()}"))

    async def ask(self, path: str, body: Body, key: str = "") -> bytes:
        assert self._transport is not None
        if isinstance(body, Keyed):
            body, key = body
        self._reply = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await self._reply

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()


async def connect(port: int, count: int) -> list[Connection]:
    """`count` connections to a server of this machine."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(Connection, "127.0.0.1", port) for _ in range(count)]
    return [connection for _, connection in made]


async def send_all(
    port: int, path: str, bodies: Iterable[Body], *, connections: int, keys: Sequence[str] = ("",)
) -> Load:
    """Send every body once, over `connections` connections at once, which take the keys in turn."""
    load, source = Load(), iter(bodies)
    lines = await connect(port, connections)
    began = time.perf_counter()
    await asyncio.gather(
        *(_drain(line, path, source, load, keys[i % len(keys)]) for i, line in enumerate(lines))
    )
    load.seconds = time.perf_counter() - began
    for line in lines:
        line.close()
    return load


async def _drain(line: Connection, path: str, source: Iterator[Body], load: Load, key: str) -> None:
    for body in source:
        sent = time.perf_counter()
        reply = await line.ask(path, body, key)
        load.latencies_s.append(time.perf_counter() - sent)
        load.replies.append(reply)


async def cycle(
    port: int, first: tuple[str, Iterable[Body]], then: tuple[str, Callable[[bytes], Body]], connections: int
) -> Load:
    """Send each of the first bodies, and after its reply the body that `then` makes of it."""
    load, source = Load(), iter(first[1])

    async def drain(line: Connection) -> None:
        for body in source:
            sent = time.perf_counter()
            reply = await line.ask(first[0], body)
            await line.ask(then[0], then[1](reply))
            load.latencies_s.append(time.perf_counter() - sent)

    lines = await connect(port, connections)
    began = time.perf_counter()
    await asyncio.gather(*(drain(line) for line in lines))
    load.seconds = time.perf_counter() - began
    for line in lines:
        line.close()
    return load
