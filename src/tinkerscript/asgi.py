"""Parts of every HTTP endpoint.

A request gets one reply, and no status after a stream's first event. A refusal has a reason and a status for
the caller's retry logic. If it asks for a retry, it says when.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_type_hints
from urllib.parse import unquote, urlsplit

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
from tinkerscript.limits import BODY, REASON_CHARS
from tinkerscript.protocol import RefusalResponse

T = TypeVar("T")

logger = logging.getLogger(__name__)


COMMENT_EVERY_S = 10.0  # Keeps proxies from closing a silent stream.
KEEP_ALIVE = b": ping\n\n"

CLIENT_CLOSED_REQUEST = 499

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


LOST = "tinkerscript.lost"


class CallerDisconnectedError(Exception): ...


class Caller:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])
        }
        """Names are in lower case. The first of equal names counts."""

        self.streaming = False
        """An error after the first event must be an event too."""

        self._disconnected: asyncio.Future[None] | None = scope.get(LOST)
        # Without `LOST`, this task watches for a disconnect.
        self._watching: asyncio.Task[None] | None = None
        self._receive = receive
        self._send = send

    @property
    def key(self) -> str:
        """The API key as OpenAI's or Anthropic's clients send it, or ""."""
        if given := self.headers.get("x-api-key", "").strip():
            return given
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else ""

    async def body(self) -> bytes:
        """Raises CallerDisconnectedError, and GatewayError 413 if it is too long."""
        try:
            return await _whole_body(self._receive)
        except ClientDisconnect as error:
            raise CallerDisconnectedError from error
        except HTTPException as error:
            raise GatewayError(error.status_code, "request_too_large", error.detail) from error

    def disconnected(self) -> asyncio.Future[None]:
        """Return a future that completes when the caller disconnects.

        It may outlive the request, so remove your callbacks.
        """
        if self._disconnected is None:
            self._disconnected = self._watching = asyncio.create_task(_until_disconnect(self._receive))
        return self._disconnected

    async def is_disconnected(self) -> bool:
        """Also true after the reply."""
        if self._disconnected is None:
            await asyncio.wait((self.disconnected(),), timeout=0)
        return self.disconnected().done()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def until_disconnect(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await `work`. If the caller disconnects, cancel it and return None."""
        disconnected, working = self.disconnected(), True
        # In Python 3.11 this would take a system call without the loop.
        this = asyncio.current_task(disconnected.get_loop())
        assert this is not None
        if disconnected.done():
            work.close()
            return None

        def cancel(_: asyncio.Future[None]) -> None:
            if working:  # The work may have ended meanwhile.
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
        await _send_json(self._send, body, status, headers)

    async def refuse(self, status: int, body: bytes) -> None:
        headers: dict[str, str] = {}
        if status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if status == 409:
            # Otherwise OpenAI's clients retry a 409.
            headers["x-should-retry"] = "false"
        await self.reply(body, status=status, headers=headers)

    async def send_events(self, events: bytes, *, last: bool = False) -> None:
        if not self.streaming:
            self.streaming = True
            start: Message = {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
            await self._send(start)
        if events or last:
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})


async def _whole_body(receive: Receive) -> bytes:
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
    # A method would make a reference cycle per request.
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeReply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


async def ask(
    app: ASGIApp, method: str, url: str, headers: Mapping[str, str], body: bytes | None
) -> WholeReply:
    """Ask an app in this process. Cancelling the call disconnects.

    An exception in the app is logged, and the reply has status 500.
    """
    asked = urlsplit(url)
    named = {"host": asked.netloc, **{name.lower(): value for name, value in headers.items()}}
    if body is not None:
        named["content-length"] = str(len(body))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": asked.scheme,
        "path": unquote(asked.path),
        "raw_path": asked.path.encode(),
        "query_string": asked.query.encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 0),
        "server": (asked.hostname, asked.port),
        LOST: asyncio.get_running_loop().create_future(),
    }
    sent, parts, begun = False, list[bytes](), dict[str, Any](status=500, headers=[])

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begun.update(message)
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        logger.exception("request.failed path=%s", asked.path)
    replied = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in begun["headers"]}
    return WholeReply(begun["status"], replied, b"".join(parts))


Responder = Callable[[Caller], Awaitable[None]]


class Deferred(Response):
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
"""`async (body: Model, request: Request) -> Model | Response`. A body that is not JSON is not passed."""

Authorize = Callable[[Scope], None]  # Raises UnauthorizedError, before the body is read.


class FastRoute(NamedTuple):
    handler: FastHandler
    authorize: Authorize
    openapi_extra: dict[str, Any] | None = None


def fast_router(routes: Mapping[str, FastRoute], *, tags: list[str]) -> APIRouter:
    router = APIRouter(tags=list(tags))
    for path, route in routes.items():
        router.post(path, openapi_extra=route.openapi_extra)(route.handler)
    return router


class _FastRequest(Request):
    # The framework would read it through two generators.
    _whole: bytes | None = None

    async def body(self) -> bytes:
        if self._whole is None:
            self._whole = await _whole_body(self.receive)
        return self._whole


class DirectRoutes:
    """ASGI middleware that answers frequent requests itself.

    FastAPI would take longer than most of these requests (`bench/interchange.py`).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        fast: Mapping[str, FastRoute],
        models: Mapping[str, Responder],
        refusals: Refusals,
    ) -> None:
        self._app = app
        self._fast = {path: (route, _parser_of(route.handler)) for path, route in fast.items()}
        self._models = models
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            if (responder := self._models.get(scope["path"])) is not None:
                await _serve(responder, scope, receive, send)
                return
            if (found := self._fast.get(scope["path"])) is not None:
                await self._answer(*found, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _answer(
        self,
        route: FastRoute,
        parse: Callable[[bytes], BaseModel] | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        request = _FastRequest(scope, receive)
        try:
            route.authorize(scope)
            arguments = (request,) if parse is None else (parse(await request.body()), request)
            reply = await route.handler(*arguments)
        except ClientDisconnect:
            return
        except (InterchangeError, RequestValidationError, HTTPException) as error:
            reply = self._refusals.answer(request, error)
        if isinstance(reply, Response):
            await reply(scope, receive, send)
        else:
            await _send_json(send, reply.__pydantic_serializer__.to_json(reply), 200, {})


def _parser_of(handler: FastHandler) -> Callable[[bytes], BaseModel] | None:
    model: type[BaseModel] | None = get_type_hints(handler).get("body")
    if model is None:
        return None
    validate = model.__pydantic_validator__.validate_json

    def parse(body: bytes) -> BaseModel:
        try:
            return validate(body)
        except ValidationError as error:
            # FastAPI's locations begin with `body`.
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
            raise RequestValidationError(errors, body=body) from None

    return parse


RETRY_AFTER_S = 1

_STATUS: dict[type[InterchangeError], int] = {
    UnknownEpisodeError: 404,
    UnknownWeightsError: 404,
    NotTheOwnerError: 409,
    ConflictError: 409,
    StoreError: 503,
}


RefusalBody = Callable[[int, str], dict[str, Any]]  # (status, reason) -> body


class Refusals:
    def __init__(self, bodies: Mapping[str, RefusalBody]) -> None:
        self._bodies = bodies

    def install(self, app: FastAPI) -> None:
        for kind in (InterchangeError, RequestValidationError, HTTPException, Exception):
            app.exception_handler(kind)(self.handle)

    async def handle(self, request: Request, error: Exception) -> JSONResponse:
        return self.answer(request, error)

    def answer(self, request: Request, error: Exception) -> JSONResponse:
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
        headers: dict[str, str] = {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        elif status in (429, 503):
            headers["Retry-After"] = str(math.ceil(retry_after_s))
        path = request.url.path
        body = next((body for prefix, body in self._bodies.items() if path.startswith(prefix)), _plain_body)
        return JSONResponse(body(status, reason[:REASON_CHARS]), status, headers)


def _plain_body(status: int, reason: str) -> dict[str, Any]:
    return RefusalResponse(failure_reason=reason).model_dump()


def _explain(item: Mapping[str, Any]) -> str:
    if item["type"] == "json_invalid":
        return f"the body is not valid JSON: {item['ctx']['error']}"
    field = ".".join(str(part) for part in item["loc"][1:]) or "the body"
    return f"{field}: {item['msg']}"


class BodyLimit:
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
        elif int(length) > self._max_bytes:  # The HTTP parser guarantees a number.
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
        return f"the request body has at least {length} bytes; the limit is {self._max_bytes}"


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

JSON = b"application/json"


def problem_with_site(scope: Scope, *, any_host: bool) -> str:
    """Return why another site's page may have caused the request, or "".

    Browsers send the page's origin, and as Host the name by which it reached this server. Only that name
    reveals DNS rebinding, so with `any_host` every request needs a secret.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"")
    if not any_host and not _is_this_machine(host):
        return (
            f"without tokens this server answers to localhost, 127.0.0.1 and ::1 only, not to "
            f"{host.decode('latin-1')!r}, because a web page could use such a name; with tokens it "
            "answers to any name (docs/security.md)"
        )
    site = headers.get(b"sec-fetch-site")
    origin = headers.get(b"origin")
    if (origin is None and site is None) or site == b"same-origin":  # Scripts cannot set these headers.
        return ""
    if scope["method"] in SAFE_METHODS:
        # Other sites may link here, but not send requests.
        is_foreign = site == b"cross-site" and headers.get(b"sec-fetch-mode") != b"navigate"
    else:
        own = headers.get(b"x-forwarded-host", host)
        is_foreign = site == b"cross-site" or (origin is not None and origin.partition(b"://")[2] != own)
    if not is_foreign:
        return ""
    whence = (origin or b"a web page").decode("latin-1")
    return (
        f"the request comes from another site: {whence}, not {host.decode('latin-1')}; a proxy in front "
        "of this server must pass the Host header on"
    )


@lru_cache(maxsize=1024)
def _is_this_machine(host: bytes) -> bool:
    # Other sites cannot have these names.
    try:
        return is_loopback((urlsplit(f"//{host.decode('ascii')}").hostname or "").lower())
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def problem_with_body(scope: Scope) -> str:
    """Return why any web page could send this body, or ""."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type")
    if kind == JSON or scope["method"] in SAFE_METHODS:
        return ""
    if kind is None:
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        return "send the body with 'Content-Type: application/json'" if has_body else ""
    media = kind.partition(b";")[0].strip().lower()
    if media == JSON or media.endswith(b"+json"):
        return ""
    return f"the body must be JSON, with 'Content-Type: application/json', not {kind.decode('latin-1')!r}"


class SiteGuard:
    def __init__(
        self,
        app: ASGIApp,
        *,
        any_host: bool,
        refusals: Refusals,
        binary: Collection[str] = (),
    ) -> None:
        """`binary` paths need a secret but no JSON."""
        self._app = app
        self._any_host = any_host
        self._refusals = refusals
        self._binary = binary

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            status, problem = 403, problem_with_site(scope, any_host=self._any_host)
            if not problem and scope["path"] not in self._binary:
                status, problem = 415, problem_with_body(scope)
            if problem:
                await self._refusals.refuse(Request(scope), status, problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def in_front(
    app: ASGIApp,
    *,
    models: Mapping[str, Responder],
    fast: Mapping[str, FastRoute] = MappingProxyType({}),
    max_body_bytes: int = BODY.limit,
    refusals: Refusals,
) -> ASGIApp:
    routed = DirectRoutes(app, fast=fast, models=models, refusals=refusals)
    limited = BodyLimit(routed, max_body_bytes, refusals)
    return ServerErrorMiddleware(limited, handler=refusals.handle)
