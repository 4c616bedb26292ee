"""uvicorn with the limits of the config: the HTTP of the server, and of each of its gateway processes.

Invariant: a connection that is not being answered can be closed, so slow or idle ones, however many, never
keep others out. One that carries a request for another process goes there (`passing`), between two requests
and with every byte that was read of the next one.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tinkerscript.asgi import LOST
from tinkerscript.config import InterchangeConfig
from tinkerscript.lifecycle import GRACE_S
from tinkerscript.server.passing import Route

OTHER_FILES = 96
"""Open files that the server needs besides its HTTP connections."""

MIN_CONNECTIONS = 32

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. Longer than clients keep theirs (httpx and openai: 5 s), so
that none of them sends a request on a connection that the server is closing."""

ACCEPTED_AT_ONCE = 8
"""New connections in a turn of the event loop."""

TARGET_BYTES = 32
"""Bytes of a request's target that say whose it is."""

METHOD_BYTES = 16


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: what runs it owns the shutdown."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._adopting = set[asyncio.Task[None]]()
        self.ready = asyncio.Event()
        """Set when connections are welcome."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvloop accepts one connection of each socket in a turn. A thousand workers that come back to a busy
        # server would wait for a thousand turns.
        copies = [each.dup() for each in sockets or () for _ in range(ACCEPTED_AT_ONCE - 1)]
        await super().startup(sockets and [*sockets, *copies])
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def adopt(self, connection: socket.socket, arrived: bytes) -> None:
        """Answer a connection of another process, on which some bytes have arrived."""
        task = asyncio.create_task(self._adopt(connection, arrived))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket, arrived: bytes) -> None:
        def protocol() -> Any:
            kind: Any = self.config.http_protocol_class
            made = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            made.arrived = arrived
            return made

        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # The client hung up.
            connection.close()


def http_server(app: ASGIApp, section: InterchangeConfig, route: Route | None = None) -> HttpServer:
    """Serves `app`. `route`: finds the connections that another process is to have; None: there are none."""
    limits = ConnectionLimits(
        header_s=section.header_timeout_s,
        body_s=section.body_timeout_s,
        connections=section.max_connections or connections_allowed(),
    )
    return HttpServer(
        uvicorn.Config(
            app,
            http=guarded_protocol(limits)
            if route is None
            else passing_protocol(guarded_protocol(limits), route),
            proxy_headers=bool(section.trusted_proxies),
            forwarded_allow_ips=section.trusted_proxies,
            ssl_certfile=section.tls_certificate or None,
            ssl_keyfile=section.tls_key or None,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=2048,
        )
    )


def connections_allowed() -> int:
    """Connections that the limit on open files leaves room for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_CONNECTIONS, files - OTHER_FILES)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a connection may take before its request has arrived, and how many there may be."""

    header_s: float
    """Seconds for the head of a request, from its first byte, or on a new connection from its start."""

    body_s: float
    """Seconds for the rest of it."""

    connections: int
    """Beyond this many, the one that has kept the server waiting longest is closed."""


TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
)


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """The class of one server's connections."""
    waiting: dict[GuardedProtocol, None] = {}

    class Guarded(GuardedProtocol):
        _limits, _waiting = limits, waiting

    return Guarded


class GuardedProtocol(HttpToolsProtocol):
    """One connection of `guarded_protocol`."""

    _limits: ConnectionLimits
    _waiting: dict[GuardedProtocol, None]
    """The connections that are not being answered, from the one that has waited longest."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._in_head, self._in_body = True, False
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._timer = self.loop.call_later(self._limits.header_s, self._time_out)
        self._timed: bool | None = False
        """Whether the timer is of a body; None without a timer."""

        self._waiting[self] = None
        if len(self.connections) > self._limits.connections:
            next(iter(self._waiting))._end(TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        self._timer.cancel()
        self._lost.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # What arrives in one piece, as most requests do, needs no timer.
        expected = self._in_body if self._in_head or self._in_body else None
        if expected == self._timed:
            return
        self._timer.cancel()
        self._timed = expected
        if expected is not None:
            limit_s = self._limits.body_s if expected else self._limits.header_s
            self._timer = self.loop.call_later(limit_s, self._time_out)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()
        cast("Scope", self.scope)[LOST] = self._lost

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and not self.transport.is_closing():
            self._waiting[self] = None

    def leave(self) -> None:
        """Let go of the connection, which somebody else answers from now on."""
        self._timer.cancel()
        self._waiting.pop(self, None)
        self.transport.abort()

    def _time_out(self) -> None:
        if self._in_body and self.flow.read_paused:  # By the server itself, which has enough to read.
            self._timer = self.loop.call_later(self._limits.body_s, self._time_out)
        else:
            self._end(TIMED_OUT)

    def _end(self, reply: bytes) -> None:
        """Close the connection, with `reply` unless another reply is on its way."""
        self._waiting.pop(self, None)
        if self.transport.is_closing():
            return
        answer = cast("RequestResponseCycle | None", self.cycle)
        if answer is None or answer.response_complete or not answer.response_started:
            self.transport.write(reply)
        self.transport.close()


def passing_protocol(base: type[GuardedProtocol], route: Route) -> type[GuardedProtocol]:
    """`base` for the connections of a server that has only some of the paths."""

    class Passing(base):
        arrived = b""
        """What was read of the first request before this process had the connection."""

        _held = b""
        """The beginning of a request, which does not say whose it is yet."""

        _arriving = False
        """Whether a request has begun to arrive, and has not arrived whole."""

        def on_message_begin(self) -> None:
            self._arriving = True
            super().on_message_begin()

        def on_message_complete(self) -> None:
            self._arriving = False
            super().on_message_complete()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if self.arrived:
                arrived, self.arrived = self.arrived, b""
                self.data_received(arrived)

        def data_received(self, data: bytes) -> None:
            if self._arriving or not _is_answered(self.cycle):
                super().data_received(data)
                return
            data = self._held + data
            target = _target(data)
            if target is None:
                self._held = data
                return
            self._held = b""
            pass_on = route(target)
            if pass_on is None:
                super().data_received(data)
            else:
                pass_on(os.dup(self.transport.get_extra_info("socket").fileno()), data)
                self.leave()

    return Passing


def _is_answered(cycle: RequestResponseCycle | None) -> bool:
    return cycle is None or cycle.response_complete


def _target(data: bytes) -> bytes | None:
    """The beginning of the request's target; None if more of the request has to arrive first."""
    _, space, rest = data[: METHOD_BYTES + TARGET_BYTES].partition(b" ")
    if not space:
        return None if len(data) < METHOD_BYTES else b""
    target, end, _ = rest.partition(b" ")
    return target if end or len(target) >= TARGET_BYTES else None
