"""What every HTTP endpoint shares: `Caller` for model requests, fast JSON routes, refusals, the body limit.

A `Caller` is one HTTP request for the model and the way to reply to it: key, body, replies, events, and
noticing a disconnect. Fast routes have a JSON body and a JSON reply; FastAPI documents them like all others,
but they are answered before its routing, with pydantic's own JSON parser and writer, in about half the
processor time (`bench/interchange.py`).

Invariants: one reply per request, and no status after the first event of a stream. Every refusal has a status
for the caller's retry logic and the reason in words: a `RefusalResponse`, or under a given path prefix the
error object of that API; one that asks for a retry says when.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerscript.errors import (
    ConflictError,
    GatewayError,
    InterchangeError,
    NotTheOwnerError,
    QuotaError,
    StoreError,
    UnauthorizedError,
    UnknownEpisodeError,
    UnknownWeightsError,
)
from tinkerscript.protocol import RefusalResponse

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


LOST = "tinkerscript.lost"
"""Where a connection leaves a future in a request's scope that is done once the connection is lost."""


class CallerDisconnectedError(Exception):
    """The caller disconnected before its request was read."""


class Caller:
    """One request and its reply."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        """By their names in lower case; of equal names the first."""

        self.streaming = False
        """Whether events were sent: an error must be an event then."""

        self._disconnected: asyncio.Future[None] | None = scope.get(LOST)
        self._watching: asyncio.Task[None] | None = None
        """Watches for a disconnect where the connection does not say."""

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
        try:
            return await _whole_body(self._receive)
        except ClientDisconnect as error:
            raise CallerDisconnectedError from error
        except HTTPException as error:  # From the limit on request bodies.
            raise GatewayError(error.status_code, "request_too_large", error.detail) from error

    def disconnected(self) -> asyncio.Future[None]:
        """Done once the caller disconnects. It may outlive the request: remove the callbacks you add."""
        if self._disconnected is None:
            self._disconnected = self._watching = asyncio.create_task(_until_disconnect(self._receive))
        return self._disconnected

    async def is_disconnected(self) -> bool:
        """Whether the caller has disconnected. Check before replying: afterwards every caller has."""
        if self._disconnected is None:
            await asyncio.wait((self.disconnected(),), timeout=0)
        return self.disconnected().done()

    async def close(self) -> None:
        """Stop watching for a disconnect."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if the caller disconnects first, which cancels `work`."""
        disconnected, working = self.disconnected(), True
        this = asyncio.current_task(disconnected.get_loop())  # Python 3.11 asks the system for the loop.
        assert this is not None
        if disconnected.done():
            work.close()
            return None

        def cancel(_: asyncio.Future[None]) -> None:
            if working:  # It may be over by the time the loop comes to this.
                this.cancel()

        disconnected.add_done_callback(cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if disconnected.done() and this.uncancel() == 0:
                return None
            raise
        finally:
            working = False
            disconnected.remove_done_callback(cancel)

    async def reply(
        self, body: bytes, *, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Send the whole reply, which is JSON."""
        await _send_json(self._send, body, status, headers)

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


async def _whole_body(receive: Receive) -> bytes:
    """Raises ClientDisconnect, and what `receive` raises."""
    parts = list[bytes]()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _send_json(send: Send, body: bytes, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    raw += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


async def _until_disconnect(receive: Receive) -> None:
    # Not a method: a task whose coroutine knows the caller, which knows the task, is a cycle per request.
    while (await receive())["type"] != "http.disconnect":
        pass


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


FastHandler = Callable[..., Awaitable[BaseModel | Response]]
"""`async (body: Model, request: Request) -> Model | Response`; without `body` it reads what is not JSON
itself."""


Authorize = Callable[[Scope], None]
"""Raises UnauthorizedError for a request that may not pass; called before its body is read."""


class FastRoute(NamedTuple):
    """What answers a path, for whom."""

    handler: FastHandler
    authorize: Authorize
    openapi_extra: dict[str, Any] | None = None
    """What the documentation says beyond the handler's types."""


def fast_router(routes: Mapping[str, FastRoute], *, tags: list[str]) -> APIRouter:
    """Documents `POST path` for each path in `routes`, which `FastRoutes` answers."""
    router = APIRouter(tags=list(tags))
    for path, route in routes.items():
        router.post(path, openapi_extra=route.openapi_extra)(route.handler)
    return router


class _FastRequest(Request):
    """Reads its body at once, and not through two of the framework's generators."""

    _whole: bytes | None = None

    async def body(self) -> bytes:
        if self._whole is None:
            self._whole = await _whole_body(self.receive)
        return self._whole


class FastRoutes:
    """ASGI middleware that answers its own paths and passes all other requests on."""

    def __init__(self, app: ASGIApp, *, routes: Mapping[str, FastRoute], refusals: Refusals) -> None:
        self._app = app
        self._routes = {path: (route, _parser_of(route.handler)) for path, route in routes.items()}
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = _FastRequest(scope, receive)
        try:
            reply = await self._answer(request, *route)
        except ClientDisconnect:
            return
        except (InterchangeError, RequestValidationError, HTTPException) as error:
            reply = self._refusals.answer(request, error)
        if isinstance(reply, Response):
            await reply(scope, receive, send)
        else:
            await _send_json(send, reply, 200, {})

    async def _answer(
        self, request: Request, route: FastRoute, parse: Callable[[bytes], BaseModel] | None
    ) -> Response | bytes:
        """Another response, or the JSON of the reply."""
        route.authorize(request.scope)
        if parse is None:
            reply = await route.handler(request)
        else:
            reply = await route.handler(parse(await request.body()), request)
        if isinstance(reply, Response):
            return reply
        return reply.__pydantic_serializer__.to_json(reply)


def _parser_of(handler: FastHandler) -> Callable[[bytes], BaseModel] | None:
    """None for a handler that reads the body itself."""
    model: type[BaseModel] | None = get_type_hints(handler).get("body")
    if model is None:
        return None
    validate = model.__pydantic_validator__.validate_json

    def parse(body: bytes) -> BaseModel:
        try:
            return validate(body)
        except ValidationError as error:
            raise RequestValidationError([_of_body(each) for each in error.errors()], body=body) from None

    return parse


def _of_body(error: Any) -> dict[str, Any]:
    """The error as FastAPI writes it: its location begins with `body`."""
    return {**error, "loc": ("body", *error["loc"])}


RETRY_AFTER_S = 1
"""Seconds after which a client should retry."""


_STATUS: dict[type[InterchangeError], int] = {
    UnknownEpisodeError: 404,
    UnknownWeightsError: 404,
    NotTheOwnerError: 409,
    ConflictError: 409,
    StoreError: 503,
}


RefusalBody = Callable[[int, str], dict[str, Any]]
"""From the status and the reason."""


class Refusals:
    """Turns errors into replies."""

    def __init__(self, bodies: Mapping[str, RefusalBody]) -> None:
        """`bodies`: path prefix -> the body of a refusal there; the first prefix that matches counts."""
        self._bodies = bodies

    def install(self, app: FastAPI) -> None:
        """Answer the errors of `app` as refusals."""
        for kind in (InterchangeError, RequestValidationError, HTTPException, Exception):
            app.exception_handler(kind)(self.handle)

    async def handle(self, request: Request, error: Exception) -> JSONResponse:
        """`answer`, as frameworks call it."""
        return self.answer(request, error)

    def answer(self, request: Request, error: Exception) -> JSONResponse:
        """The refusal for `error`. For a defect the framework raises it again and logs its traceback."""
        match error:
            case UnauthorizedError():
                return self.refuse(request, error.status, str(error))
            case QuotaError():
                return self.refuse(request, 429, str(error), retry_after_s=error.retry_after_s)
            case InterchangeError():
                return self.refuse(request, _STATUS.get(type(error), 500), str(error))
            case RequestValidationError():
                return self.refuse(request, 422, "; ".join(_explain(item) for item in error.errors()))
            case HTTPException():
                return self.refuse(request, error.status_code, str(error.detail))
            case _:
                reason = f"internal error ({type(error).__name__}); see the server's log"
                return self.refuse(request, 500, reason)

    def refuse(
        self, request: Request, status: int, reason: str, *, retry_after_s: float = RETRY_AFTER_S
    ) -> JSONResponse:
        """The refusal as a reply."""
        headers: dict[str, str] = {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        elif status in (429, 503):
            headers["Retry-After"] = str(math.ceil(retry_after_s))
        path = request.url.path
        body = next((body for prefix, body in self._bodies.items() if path.startswith(prefix)), _plain_body)
        return JSONResponse(body(status, reason), status, headers)


def _plain_body(status: int, reason: str) -> dict[str, Any]:
    return RefusalResponse(failure_reason=reason).model_dump()


def _explain(item: Mapping[str, Any]) -> str:
    if item["type"] == "json_invalid":
        return f"the body is not valid JSON: {item['ctx']['error']}"
    field = ".".join(str(part) for part in item["loc"][1:]) or "the body"
    return f"{field}: {item['msg']}"


class ForMembers:
    """ASGI middleware that lets only authorized requests to some paths."""

    def __init__(
        self, app: ASGIApp, *, paths: Collection[str], authorize: Authorize, refusals: Refusals
    ) -> None:
        self._app = app
        self._paths = paths
        self._authorize = authorize
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in self._paths:
            try:
                self._authorize(scope)
            except UnauthorizedError as error:
                await self._refusals.answer(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """ASGI middleware that answers 413 to a request whose body is longer than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int, refusals: Refusals) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if length is None:
            await self._app(scope, self._counted(receive), send)
        elif int(length) > self._max_bytes:  # The HTTP parser has checked that it is a number.
            refusal = self._refusals.refuse(Request(scope), 413, self._reason(int(length)))
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._reason(received))
            return message

        return counted

    def _reason(self, length: int) -> str:
        return (
            f"the body has {length} bytes or more; interchange_server.max_body_bytes allows {self._max_bytes}"
        )


def in_front(
    app: ASGIApp,
    *,
    models: Mapping[str, Responder],
    fast: Mapping[str, FastRoute] = MappingProxyType({}),
    max_body_bytes: int,
    refusals: Refusals,
) -> ASGIApp:
    """`app` behind a limit on bodies and the routes that programs call all the time.

    Those never enter `app`: FastAPI's own layers cost as much as the shortest requests themselves.
    """
    routed = ModelRoutes(FastRoutes(app, routes=fast, refusals=refusals), routes=models)
    limited = BodyLimit(routed, max_body_bytes, refusals)
    return ServerErrorMiddleware(limited, handler=refusals.handle)
