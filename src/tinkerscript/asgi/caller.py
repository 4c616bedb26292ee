"""`Caller`: one HTTP request for the model, and the way to reply to it.

Owns what is HTTP rather than model: key, body, replies, events, and noticing a disconnect. Invariant: one
reply per request, and no status after the first event of a stream.
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

T = TypeVar("T")

KEEP_ALIVE_S = 10.0
"""A stream that is silent for this long sends a comment, so that the connection stays open."""

KEEP_ALIVE = b": ping\n\n"

CLIENT_CLOSED_REQUEST = 499

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class CallerDisconnectedError(Exception):
    """The caller disconnected before its request was read."""


class Caller:
    """One request and its reply."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.streaming = False
        """Whether events were sent: an error must be an event then."""

        self._disconnect: asyncio.Future[None] | None = None
        self._receive = receive
        self._send = send

    @property
    def key(self) -> str:
        """The API key, as OpenAI's or Anthropic's clients send it. Raises GatewayError 401."""
        if given := self.headers.get("x-api-key", "").strip():
            return given
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            message = "send the claim's API key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise GatewayError(401, "invalid_api_key", message)
        return key.strip()

    async def body(self) -> bytes:
        """The whole body. Raises CallerDisconnectedError, and GatewayError 413 if it is too long."""
        parts = list[bytes]()
        while True:
            try:
                message = await self._receive()
            except HTTPException as error:  # From the limit on request bodies.
                raise GatewayError(error.status_code, "request_too_large", error.detail) from error
            if message["type"] == "http.disconnect":
                raise CallerDisconnectedError
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    def disconnected(self) -> asyncio.Future[None]:
        """Done once the caller disconnects. `close` cancels it."""
        if self._disconnect is None:
            self._disconnect = asyncio.ensure_future(self._watch())
        return self._disconnect

    async def is_disconnected(self) -> bool:
        """Whether the caller has disconnected. Check before replying: afterwards every caller has."""
        if self._disconnect is None:
            await asyncio.wait((self.disconnected(),), timeout=0)
        return self.disconnected().done()

    async def close(self) -> None:
        """Stop watching for a disconnect."""
        if self._disconnect is not None:
            self._disconnect.cancel()
            await asyncio.gather(self._disconnect, return_exceptions=True)

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if the caller disconnects first, which cancels `work`."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self.disconnected()), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self, body: bytes, *, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Send the whole reply, which is JSON."""
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        raw += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, status: int, body: bytes) -> None:
        """Send an error, with the headers by which clients decide whether to retry."""
        headers: dict[str, str] = {}
        if status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if status == 409:
            # OpenAI's clients retry a 409 otherwise.
            headers["x-should-retry"] = "false"
        await self.reply(body, status=status, headers=headers)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        """Send events; the first ones start the reply."""
        if not self.streaming:
            self.streaming = True
            start: Message = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
            await self._send(start)
        if events or last:
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})


Responder = Callable[[Caller], Awaitable[None]]


class ModelRoutes:
    """ASGI middleware that serves its routes, and passes everything else on.

    FastAPI documents the same routes; its routing would cost as much as the rest of a short call.
    """

    def __init__(self, app: ASGIApp, *, routes: Mapping[str, Responder]) -> None:
        """`routes`: whole path -> responder to a POST."""
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            await _serve(answer, scope, receive, send)


class Deferred(Response):
    """A FastAPI response that lets a responder reply by itself; FastAPI documents the route."""

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
