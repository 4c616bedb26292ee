"""`wire_app`: the calls as an ASGI application.

Every error leaves as `{"detail": message}` with a status that the SDK's retries understand: 400, 404, 410
and 422 are final, 408 and 429 mean later, 5xx is the server's fault. No request is served without an API
key, any unless the server has one of its own: a web page cannot send that header unasked.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinkerscript.engine.wire import rest_calls, sampling_calls, session_calls, training_calls
from tinkerscript.engine.wire.calls import PREFIX, Call
from tinkerscript.engine.wire.state import WireState
from tinkerscript.errors import EngineRequestError, TinkerScriptError, WireError

CALLS = [*session_calls.CALLS, *training_calls.CALLS, *sampling_calls.CALLS, *rest_calls.CALLS]
HOUSEKEEPING_S = 10.0
OPEN_PATHS = frozenset({"healthz"})

logger = logging.getLogger(__name__)


def wire_app(state: WireState, *, api_key: str | None = None) -> Starlette:
    """The application. `api_key`: the only one that is let in; None: any."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        del app
        keeper = asyncio.create_task(_keep_house(state))
        try:
            yield
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
            await state.futures.close()

    routes = [
        Route(PREFIX + call.path, _endpoint(state, call, api_key), methods=[call.method]) for call in CALLS
    ]
    every = ["GET", "POST", "PUT", "DELETE", "PATCH"]
    routes.append(Route("/{path:path}", _unknown, methods=every))
    return Starlette(routes=routes, lifespan=lifespan)


def _endpoint(state: WireState, call: Call, api_key: str | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            if call.path not in OPEN_PATHS:
                _authorise(request, api_key)
            body = await _body(request, state.limits.body_bytes)
            reply = await call.handler(state, request, body)
        except WireError as error:
            return _refusal(error.status, str(error))
        except EngineRequestError as error:
            return _refusal(400, str(error))
        except TinkerScriptError as error:
            logger.warning("wire.refused path=%s error=%s", call.path, error)
            return _refusal(500, str(error))
        if isinstance(reply, Response):
            return reply
        return Response(status_code=204) if reply is None else JSONResponse(reply)

    return endpoint


def _authorise(request: Request, api_key: str | None) -> None:
    given = request.headers.get("x-api-key", "")
    if not given:
        raise WireError(401, "X-API-Key: the header is missing; any key will do unless the server has one")
    if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
        raise WireError(401, "X-API-Key: this is not the server's key")


async def _body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise WireError(413, f"the body has more than {limit} bytes")
    return bytes(body)


async def _unknown(request: Request) -> Response:
    return _refusal(404, f"{request.method} {request.url.path}: the embedded engine does not serve this")


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"detail": message}, status_code=status)


async def _keep_house(state: WireState) -> None:
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        state.housekeeping()
