"""uvicorn with limits on connections.

Slow or idle connections cannot keep others out. Unfinished requests and unread answers are bounded in bytes
and time.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tinkerscript.asgi import LOST
from tinkerscript.config import InterchangeConfig
from tinkerscript.lifecycle import GRACE_S
from tinkerscript.limits import HEAD, PIPELINED

OTHER_FILES = 96  # Files that are not HTTP connections.
MIN_CONNECTIONS = 32

# Clients keep connections for 5 s (httpx, openai), and must not use a closing one.
KEEP_ALIVE_S = 75

# Linux doubles it. With its default of megabytes, slow readers would look stopped.
KERNEL_BYTES = 2**18

REQUEST_LINE_BYTES = 32


class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def http_server(
    app: ASGIApp,
    section: InterchangeConfig,
    *,
    lifespan: Literal["on", "off"] = "off",
    grace_s: int = GRACE_S,
    limits: ConnectionLimits | None = None,
) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            http=guarded_protocol(limits or ConnectionLimits()),
            proxy_headers=bool(section.trusted_proxies),
            forwarded_allow_ips=section.trusted_proxies,
            ssl_certfile=section.tls_certificate or None,
            ssl_keyfile=section.tls_key or None,
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=grace_s,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=2048,
        )
    )


def connections_allowed() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_CONNECTIONS, files - OTHER_FILES)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    header_s: float = 10.0
    """Seconds for a request's head."""

    body_s: float = 60.0
    """Seconds for a request's body, and between a client's reads of an answer."""

    connections: int = field(default_factory=connections_allowed)
    """Beyond this, the longest-waiting connection is closed."""


def _closing(status: int, reason: str, more: str = "", body: str = "") -> bytes:
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
    return f"{head}{body}".encode()


BAD = _closing(400, "Bad Request")
TIMED_OUT = _closing(408, "Request Timeout")
TOO_LONG = _closing(
    HEAD.status,
    "Request Header Fields Too Large",
    "content-type: application/json\r\n",
    json.dumps({"error": {"message": f"{HEAD.name} allows {HEAD.limit} {HEAD.unit}: {HEAD.remedy}"}}),
)
TOO_MANY = _closing(503, "Service Unavailable", "retry-after: 1\r\n")


class _RefusedError(Exception):
    pass


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    waiting: dict[GuardedProtocol, None] = {}

    class Guarded(GuardedProtocol):
        _limits, _waiting = limits, waiting

    return Guarded


class GuardedProtocol(HttpToolsProtocol):
    _limits: ConnectionLimits
    _waiting: dict[GuardedProtocol, None]
    """Connections without a running answer, the longest-waiting first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        self._in_head, self._in_body = True, False
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._timer = self.loop.call_later(self._limits.header_s, self._time_out)
        self._timed: bool | None = False  # None without a timer for the body.
        self._arrived = 0
        """Bytes since the last head or part of a body."""

        self._advanced = False
        self._refusal = BAD
        self._unread = 0
        self._reader_timer: asyncio.TimerHandle | None = None
        self._holds_back = False  # Waits until the client reads the answer.
        self._waiting[self] = None
        if len(self.connections) > self._limits.connections:
            next(iter(self._waiting))._end(TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        self._timer.cancel()
        self._stop_reader_timer()
        self._lost.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._arrived += len(data)
        super().data_received(data)
        if self._advanced:
            self._advanced, self._arrived = False, 0
        elif self._arrived > HEAD.limit + REQUEST_LINE_BYTES:  # The head, or its trailers, does not end.
            self._end(TOO_LONG)
        # Most requests arrive whole.
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
        self._in_head, self._in_body, self._advanced = False, True, True
        if self._arrived > HEAD.limit and _head_bytes(self.url, self.headers) > HEAD.limit:
            self._refusal = TOO_LONG
            raise _RefusedError
        if len(self.pipeline) >= PIPELINED:
            raise _RefusedError
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._advanced = False, True
        if not self.flow.write_paused:
            self._waiting.pop(self, None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._end(self._refusal)

    def on_response_complete(self) -> None:
        if self.flow.write_paused and not self.transport.is_closing():
            self._holds_back = True
            self.flow.pause_reading()
            return
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()
        elif not self.pipeline:
            self._waiting[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.transport.is_closing():
            return
        self._stop_reader_timer()
        if self._holds_back:
            self._holds_back = False
            self.on_response_complete()
        elif not (self._in_head or self._in_body):
            self._waiting.pop(self, None)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._await_reader()

    def _await_reader(self) -> None:
        """Continue only once the client reads."""
        if self._lost.done():
            return
        self._waiting.setdefault(self)
        self._unread = self.transport.get_write_buffer_size()
        self._stop_reader_timer()
        self._reader_timer = self.loop.call_later(self._limits.body_s, self._check_reader)

    def _check_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread:
            self._await_reader()
        else:
            self.transport.abort()

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _time_out(self) -> None:
        if self._in_body and self.flow.read_paused:  # The server itself has paused reading.
            self._timer = self.loop.call_later(self._limits.body_s, self._time_out)
        else:
            self._end(TIMED_OUT)

    def _end(self, reply: bytes) -> None:
        self._waiting.pop(self, None)
        if self.transport.is_closing() or self.flow.write_paused:
            self.transport.abort()  # A normal close would wait for the client to read.
            return
        answer = cast("RequestResponseCycle | None", self.cycle)
        is_free = answer is None or answer.response_complete or not answer.response_started
        if is_free and not self.pipeline:
            self.transport.write(reply)
        self.transport.close()
        self._await_reader()


def _head_bytes(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
