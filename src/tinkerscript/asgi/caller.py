"""`Caller`: one HTTP request for the model, and the way back to whoever sent it.

Owns what is HTTP and not the model's: key, body, replies, events, and noticing that the caller went away.
Invariant: one reply a request, and after the first event of a stream no status any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerscript.asgi.refusals import RETRY_AFTER_S
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects import Dialect

T = TypeVar("T")


KEEP_ALIVE_S = 10.0
"""A stream that has nothing to say for so long sends a comment, so that nobody takes it for dead."""


KEEP_ALIVE = b": ping\n\n"


CLIENT_CLOSED_REQUEST = 499


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class CallerGoneError(Exception):
    """The caller hung up before its request was read."""


class Caller:
    """Who asks. Use once."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.streaming = False
        """Whether events went out: an error must be an event then."""

        self._gone: asyncio.Future[None] | None = None
        self._receive = receive
        self._send = send

    @property
    def key(self) -> str:
        """The API key, as OpenAI's or Anthropic's clients send it. Raises GatewayError 401 without one."""
        if given := self.headers.get("x-api-key", "").strip():
            return given
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "send the claim's API key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise GatewayError(401, "invalid_api_key", message)
        return key.strip()

    async def body(self) -> bytes:
        """The whole body. Raises CallerGoneError, and GatewayError 413 for one that is too long."""
        parts = list[bytes]()
        while True:
            try:
                message = await self._receive()
            except HTTPException as error:  # of the server, which limits bodies
                raise GatewayError(error.status_code, "request_too_large", error.detail) from error
            if message["type"] == "http.disconnect":
                raise CallerGoneError
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    def gone(self) -> asyncio.Future[None]:
        """Done once the caller hung up. `close` ends the watch."""
        if self._gone is None:
            self._gone = asyncio.ensure_future(self._disconnected())
        return self._gone

    async def hung_up(self) -> bool:
        """Whether the caller is known to have gone. Ask before the reply: after it everyone has."""
        if self._gone is None:
            await asyncio.wait((self.gone(),), timeout=0)
        return self.gone().done()

    async def close(self) -> None:
        """The request was answered."""
        if self._gone is not None:
            self._gone.cancel()
            await asyncio.gather(self._gone, return_exceptions=True)

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns, or None if the caller went away first; `work` is cancelled then."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self.gone()), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self, body: bytes, *, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """The whole reply, as JSON."""
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        raw += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, dialect: Dialect, error: GatewayError) -> None:
        """`error` in the dialect's shape, with what a retrying client needs to know."""
        headers: dict[str, str] = {}
        if error.status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if error.status == 409:
            # OpenAI's clients repeat a 409 unless told that it is final.
            headers["x-should-retry"] = "false"
        await self.reply(dialect.error(error), status=error.status, headers=headers)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send events now; the first ones begin the reply."""
        if not self.streaming:
            self.streaming = True
            start: Message = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
            await self._send(start)
        if events or last:
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})


Responder = Callable[[Caller], Awaitable[None]]


class ModelRoutes:
    """ASGI middleware that answers the routes it knows, and passes everything else on.

    FastAPI documents the same routes; its routing would cost as much as the rest of a short call.
    """

    def __init__(self, app: ASGIApp, *, routes: Mapping[str, Responder]) -> None:
        """`routes`: who answers a POST, by whole path."""
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            await _serve(answer, scope, receive, send)


class Deferred(Response):
    """Lets a route of FastAPI, which documents it, answer by itself."""

    def __init__(self, answer: Responder) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _serve(self._answer, scope, receive, send)


async def _serve(answer: Responder, scope: Scope, receive: Receive, send: Send) -> None:
    caller = Caller(scope, receive, send)
    try:
        await answer(caller)
    finally:
        await caller.close()
