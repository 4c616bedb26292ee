"""The page of a run at the server's own address: `PageProxy` forwards its requests to a child process.

The child, a `PageProcess`, listens on a Unix socket. It checks itself who may see the page, so its requests
reach it before any role is checked here; no other request does.

Invariants: no page is started before somebody asks for it; a request waits for it at most `START_S` seconds;
one that has ended, because nobody came for some minutes or because it died, is started again with the next
request; none outlives the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Collection
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkerscript.asgi import Refusals
from tinkerscript.errors import TinkerScriptError
from tinkerscript.lifecycle import describe_exit, last_lines
from tinkerscript.server.addresses import socket_path
from tinkerscript.server.auth import ADMIN_TOKEN, TOKEN_VARIABLES
from tinkerscript.server.page_child import ask_to_stop, page_log, start_page, stop_page

START_S = 30.0
"""Seconds that the page may take to listen."""

POLL_S = 0.02

PAUSE_S = 5.0
"""Seconds after a page that could not start in which none is started."""

TIMEOUTS = {"connect": 5.0, "write": 60.0, "read": 180.0, "pool": 5.0}
"""Seconds. A page's reply may take long: a model samples it. Its event streams are never silent for long."""

CONNECTIONS = httpx.Limits(max_connections=1000, max_keepalive_connections=20, keepalive_expiry=2.0)
"""Connections are closed before the page closes them, which may cross a request."""

DIED = (httpx.ConnectError, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
"""What a request to a page that has just died ends with."""

PATHS = frozenset({"/", "/docs", "/favicon.ico"})
PREFIXES = ("/page/", "/api/")

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
    }
)
"""Headers of one connection (RFC 9110, 7.6.1)."""

FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-proto", b"forwarded"})
"""Headers that say who the caller is. The server says it itself: it knows which proxies to believe."""

Headers = list[tuple[bytes, bytes]]

logger = logging.getLogger(__name__)

_broke_off: ContextVar[bool] = ContextVar("broke_off", default=False)
"""Whether the reply to the current request ends in its middle, since the page has died."""


def _is_news(record: logging.LogRecord) -> bool:
    """uvicorn complains of a reply that has no end. It closes the connection, which is what is wanted."""
    return not (_broke_off.get() and record.levelno == logging.ERROR)


class PageUnavailableError(TinkerScriptError):
    """The page of the run does not answer now."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A page that listens."""

    process: Process
    transport: httpx.AsyncHTTPTransport


class PageProcess:
    """The child process, from the first request to the end of the server. For one event loop."""

    def __init__(self, run_dir: Path, *, admin_token: str | None, withheld: Collection[str] = ()) -> None:
        """`admin_token`: of this server; None lets everybody in who reaches it by a loopback name.
        `withheld`: variables that the child does not get.

        Raises ConfigError for a socket that cannot be private.
        """
        self.run_dir = run_dir
        not_its = {*TOKEN_VARIABLES, *withheld}
        self._environ = {name: value for name, value in os.environ.items() if name not in not_its}
        if admin_token is not None:
            self._environ[ADMIN_TOKEN] = admin_token
        self._path = socket_path(run_dir, "page.sock")
        self._running: _Running | None = None
        self._starting: asyncio.Task[_Running] | None = None
        self._failure = ""
        self._failed_at = 0.0
        self.closing = asyncio.Event()
        """Set when the server shuts down: replies end, and no page is started."""

    async def run(self) -> None:
        """Wait until cancelled, then end the page."""
        try:
            await asyncio.Event().wait()
        finally:
            self.close()
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)
            await self._end()

    def close(self) -> None:
        """The server shuts down."""
        self.closing.set()
        if self._running is not None:
            ask_to_stop(self._running.process)

    async def running(self) -> _Running:
        """The page, started if need be. Raises PageUnavailableError."""
        if self.closing.is_set():
            raise PageUnavailableError("the server is stopping")
        if self._running is not None and self._running.process.returncode is None:
            return self._running
        if self._failure and time.monotonic() - self._failed_at < PAUSE_S:
            raise PageUnavailableError(self._failure)
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="start the page")
            self._starting.add_done_callback(self._started)
        return await asyncio.shield(self._starting)  # It starts for the others too.

    async def check(self, running: _Running) -> None:
        """Forget the page if it has died, before its end is reported, or does not listen any more."""
        if not await _accepts(self._path) and self._running is running:
            await self._end()

    def _started(self, starting: asyncio.Task[_Running]) -> None:
        self._starting = None
        if not starting.cancelled() and (error := starting.exception()) is not None:
            self._failure, self._failed_at = str(error), time.monotonic()
            logger.warning("page.not_started reason=%s", error)

    async def _start(self) -> _Running:
        await self._end()
        process = await start_page(self.run_dir, "--socket", str(self._path), environ=self._environ)
        try:
            await self._listens(process)
        except BaseException:
            await asyncio.shield(stop_page(process))
            raise
        logger.info("page.started pid=%d socket=%s", process.pid, self._path)
        transport = httpx.AsyncHTTPTransport(uds=str(self._path), limits=CONNECTIONS)
        self._running = _Running(process, transport)
        return self._running

    async def _listens(self, process: Process) -> None:
        deadline = time.monotonic() + START_S
        log = page_log(self.run_dir)
        while not await _accepts(self._path):
            if process.returncode is not None:
                raise PageUnavailableError(
                    f"the page ended at once ({describe_exit(process.returncode)}); the end of {log}:\n"
                    f"{last_lines(log)}"
                )
            if time.monotonic() > deadline:
                raise PageUnavailableError(f"the page did not start within {START_S:.0f} s; see {log}")
            await asyncio.sleep(POLL_S)

    async def _end(self) -> None:
        """End the page that listens, if there is one."""
        running, self._running = self._running, None
        if running is None:
            return
        code = running.process.returncode
        if code:
            logger.warning("page.ended %s log=%s", describe_exit(code), page_log(self.run_dir))
        elif code == 0:
            logger.info("page.ended idle")
        await asyncio.shield(stop_page(running.process))
        await running.transport.aclose()
        with contextlib.suppress(OSError):
            self._path.unlink()


async def _accepts(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


class PageProxy:
    """ASGI middleware that forwards the page's paths, and passes everything else on."""

    def __init__(self, app: ASGIApp, *, page: PageProcess, refusals: Refusals) -> None:
        self._app = app
        self._page = page
        self._refusals = refusals
        logging.getLogger("uvicorn.error").addFilter(_is_news)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] in PATHS or scope["path"].startswith(PREFIXES)):
            exchange = _Exchange(self._page, scope, receive, send)
            try:
                await exchange.run()
            except (PageUnavailableError, HTTPException) as error:
                status = error.status_code if isinstance(error, HTTPException) else 503
                reason = error.detail if isinstance(error, HTTPException) else str(error)
                await self._refusals.refuse(Request(scope), status, reason)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _DisconnectedError(Exception):
    """The browser went before its request was read."""


class _Exchange:
    """One request and its reply, both streamed."""

    def __init__(self, page: PageProcess, scope: Scope, receive: Receive, send: Send) -> None:
        self._page = page
        self._scope = scope
        self._receive = receive
        self._send = send
        self._started = self._chunked = False
        """Whether the reply has begun, and whether it is one without a length."""

        self._has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        self._body_read = asyncio.Event()

    async def run(self) -> None:
        """Forward until the reply is complete, the browser disconnects, or the server shuts down.

        Before the reply begins, it raises PageUnavailableError, and HTTPException for a request that is too
        long.
        """
        forwarding = asyncio.create_task(self._forward())
        others = [asyncio.create_task(self._disconnected()), asyncio.create_task(self._page.closing.wait())]
        try:
            await asyncio.wait((forwarding, *others), return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                _broke_off.set(not forwarding.result())
                return
        finally:
            for task in (forwarding, *others):
                task.cancel()
            await asyncio.gather(forwarding, *others, return_exceptions=True)
        if not self._started:
            raise PageUnavailableError("the server is stopping")
        if self._chunked:
            await self._send({"type": "http.response.body", "body": b""})

    async def _disconnected(self) -> None:
        if self._has_body:
            await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _forward(self) -> bool:
        """Whether the reply has an end."""
        try:
            response = await self._answered()
        except _DisconnectedError:
            return True
        except httpx.TransportError as error:
            reason = f"the page did not answer: {type(error).__name__} {error}".rstrip()
            raise PageUnavailableError(f"{reason}; see {page_log(self._page.run_dir)}") from error
        try:
            await self._reply(response)
        except (
            httpx.TransportError
        ) as error:  # The reply has begun: it ends here, and so does its connection.
            logger.warning("page.broke_off path=%s error=%r", self._scope["path"], error)
            return False
        finally:
            await response.aclose()
        return True

    async def _answered(self) -> httpx.Response:
        """The beginning of the page's reply."""
        running = await self._page.running()
        try:
            return await running.transport.handle_async_request(self._request())
        except DIED as error:
            if self._scope["method"] not in ("GET", "HEAD") and not isinstance(error, httpx.ConnectError):
                raise
            await self._page.check(running)
        running = await self._page.running()
        return await running.transport.handle_async_request(self._request())

    def _request(self) -> httpx.Request:
        scope = self._scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [pair for pair in _end_to_end(scope["headers"]) if pair[0] not in FORWARDED]
        if scope.get("client"):
            headers.append((b"x-forwarded-for", scope["client"][0].encode()))
        headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
        return httpx.Request(
            scope["method"],
            "http://page/",
            headers=headers,
            content=self._body() if self._has_body else None,
            extensions={"target": target, "timeout": TIMEOUTS},
        )

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _DisconnectedError
            if part := message.get("body", b""):
                yield part
            if not message.get("more_body", False):
                break
        self._body_read.set()

    async def _reply(self, response: httpx.Response) -> None:
        self._started, self._chunked = True, "content-length" not in response.headers
        start = {"type": "http.response.start", "status": response.status_code}
        await self._send(start | {"headers": _end_to_end(response.headers.raw)})
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for part in response.stream:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def _end_to_end(headers: Headers) -> Headers:
    """The headers that are not about the connection, their names in lower case."""
    lower = [(name.lower(), value) for name, value in headers]
    named = b",".join(value for name, value in lower if name == b"connection").lower()
    dropped = HOP_BY_HOP | {name.strip() for name in named.split(b",")}
    return [pair for pair in lower if pair[0] not in dropped]
