"""`wire_app`: the calls as an ASGI application.

Every error leaves as `{"detail": message}` with a status that the SDK's retries understand: 400, 404, 410
and 422 are final, 408 and 429 mean later, 5xx is the server's fault. No request is served without an API
key, any unless the server has one of its own: a web page cannot send that header unasked.

The wire server as a process: uvicorn over `wire_app`, and the line that says where it is.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.errors import ConfigError, EngineRequestError, TinkerScriptError, WireError
from tinkerscript.tinker_api import rest_endpoints as rest_calls
from tinkerscript.tinker_api import sampling_endpoints as sampling_calls
from tinkerscript.tinker_api import session_endpoints as session_calls
from tinkerscript.tinker_api import training_endpoints as training_calls
from tinkerscript.tinker_api.endpoint import PREFIX, Endpoint
from tinkerscript.tinker_api.state import WireLimits, WireState

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


def _endpoint(
    state: WireState, call: Endpoint, api_key: str | None
) -> Callable[[Request], Awaitable[Response]]:
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


KEY_VARIABLE = "TINKERSCRIPT_ENGINE_KEY"
"""Environment variable with the only API key that the server lets in."""


@dataclass(frozen=True, slots=True)
class WireOptions:
    """Where a wire server is and what it serves."""

    folder: Path
    """Of the base model."""

    state_dir: Path
    """Of sessions and checkpoints."""

    name: str
    """The model's name to clients."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""

    threads: int = 1
    max_batch: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    limits: WireLimits = field(default_factory=WireLimits)


async def serve_wire(options: WireOptions, announce: Callable[[str], None]) -> None:
    """Serve until cancelled; `announce` gets the URL once it listens. Raises ConfigError."""
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not _loopback(options.host):
        raise ConfigError(
            f"--host {options.host} is open to others: set {KEY_VARIABLE} to the API key that they must send "
            "(the SDK wants one that starts with tml-)"
        )
    listener = _listener(options.host, options.port)
    with (
        listener,
        EmbeddedEngine(
            options.folder,
            checkpoint_dir=options.state_dir / "checkpoints",
            seed=options.seed,
            threads=options.threads,
            max_batch=options.max_batch,
            device=options.device,
            dtype=options.dtype,
        ) as engine,
    ):
        state = WireState(engine, options.state_dir, name=options.name, limits=options.limits)
        config = uvicorn.Config(
            wire_app(state, api_key=key), log_level="warning", timeout_graceful_shutdown=2
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await server.listening.wait()
            announce(f"http://{options.host}:{listener.getsockname()[1]}")
            await asyncio.shield(serving)
        finally:
            state.futures.release_waiting()
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals to the command."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """The command line has handlers of its own."""
        yield


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
