"""The Tinker server: its endpoint table, ASGI application, and process.

Errors are `{"detail": message}`; docs/tinker.md#the-server says how the SDK acts on each status. All requests
but the health check need an `X-API-Key` header, which another site's page cannot send.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types
from tinker.types.create_sampling_session_request import CreateSamplingSessionRequest
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

from tinkerscript.asgi import is_loopback, problem_with_site
from tinkerscript.config import InterchangeConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import ConfigError, EngineRequestError, TinkerScriptError, WireError
from tinkerscript.http_server import ConnectionLimits, http_server
from tinkerscript.tinker_api import sampling_endpoints as sampling
from tinkerscript.tinker_api import session_endpoints as session
from tinkerscript.tinker_api import training_endpoints as training
from tinkerscript.tinker_api.codec import Reply, read_json
from tinkerscript.tinker_api.state import WireLimits, WireState

PREFIX = "/api/v1/"
HEALTH = "healthz"
HOUSEKEEPING_S = 10.0
LIMITS = ConnectionLimits(body_s=600.0)  # A training batch may take minutes.
ENGINE_GRACE_S = 2

M = TypeVar("M", bound=BaseModel)

Handler = Callable[[WireState, Request, bytes], Awaitable[Reply]]


# For the engine's own, unused training client.
UNUSED_ADAPTER = LoraSettings(rank=1, targets=("unembed",))

logger = logging.getLogger(__name__)


def _json(model: type[M], handler: Callable[[WireState, M], Awaitable[Reply]]) -> Handler:
    async def handle(state: WireState, request: Request, body: bytes) -> Reply:
        del request
        return await handler(state, read_json(model, body))

    return handle


def _no_body(handler: Callable[[WireState, Request], Awaitable[Reply]]) -> Handler:
    async def handle(state: WireState, request: Request, body: bytes) -> Reply:
        del body
        return await handler(state, request)

    return handle


def _fixed(reply: dict[str, Any]) -> Handler:
    # We do not store telemetry.
    async def handle(state: WireState, request: Request, body: bytes) -> Reply:
        del state, request, body
        return reply

    return handle


_CHECKPOINT = "training_runs/{run_id}/checkpoints/{kind}/{name}"


WIRE_ENDPOINTS: Mapping[tuple[str, str], Handler] = {
    ("GET", HEALTH): _fixed({"status": "ok"}),
    ("POST", "client/config"): _fixed(session.CLIENT_CONFIG),
    ("POST", "client/dynamic_config"): _fixed(session.DYNAMIC_CONFIG),
    ("POST", "telemetry"): _fixed({"status": "accepted"}),
    ("GET", "get_server_capabilities"): _no_body(session.capabilities),
    ("POST", "create_session"): _json(types.CreateSessionRequest, session.create_session),
    ("POST", "session_heartbeat"): _json(SessionHeartbeatRequest, session.heartbeat),
    ("POST", "sessions/{session_id}/finish"): session.finish_session,
    ("POST", "retrieve_future"): session.retrieve_future,
    ("POST", "cancel_future"): _json(session.CancelRequest, session.cancel_future),
    ("POST", "create_model"): _json(types.CreateModelRequest, training.create_model),
    ("POST", "get_info"): _json(types.GetInfoRequest, training.get_info),
    ("POST", "forward_backward"): training.forward_backward,
    ("POST", "optim_step"): _json(types.OptimStepRequest, training.optim_step),
    ("POST", "save_weights"): _json(types.SaveWeightsRequest, training.save_weights),
    ("POST", "save_weights_for_sampler"): _json(
        types.SaveWeightsForSamplerRequest, training.save_weights_for_sampler
    ),
    ("POST", "load_weights"): _json(types.LoadWeightsRequest, training.load_weights),
    ("POST", "create_sampling_session"): _json(
        CreateSamplingSessionRequest, sampling.create_sampling_session
    ),
    ("POST", "join_sampling_session"): _json(JoinSamplingSessionRequest, sampling.join_sampling_session),
    ("POST", "asample"): _json(types.SampleRequest, sampling.asample),
    ("POST", "weights_info"): _json(session.WeightsInfoRequest, session.weights_info),
    ("GET", "samplers/{sampler_id}"): _no_body(session.get_sampler),
    ("GET", "sessions"): _no_body(session.list_sessions),
    ("GET", "sessions/{session_id}"): _no_body(session.get_session),
    ("GET", "training_runs"): _no_body(session.list_training_runs),
    ("GET", "training_runs/{run_id}"): _no_body(session.get_training_run),
    ("GET", "training_runs/{run_id}/checkpoints"): _no_body(session.list_run_checkpoints),
    ("GET", "checkpoints"): _no_body(session.list_checkpoints),
    ("DELETE", _CHECKPOINT): _no_body(session.delete_checkpoint),
    ("PUT", f"{_CHECKPOINT}/ttl"): session.set_ttl,
    ("POST", f"{_CHECKPOINT}/publish"): _no_body(session.publish),
    ("DELETE", f"{_CHECKPOINT}/publish"): _no_body(session.unpublish),
}
"""Keys are method and path after `PREFIX`. Parts in braces are `path_params`."""


def wire_app(state: WireState, *, api_key: str | None = None) -> Starlette:
    """If `api_key` is given, only this key is accepted."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        del app
        housekeeping = asyncio.create_task(_keep_house(state))
        try:
            yield
        finally:
            housekeeping.cancel()
            await asyncio.gather(housekeeping, return_exceptions=True)
            await state.futures.close()

    routes = [
        Route(PREFIX + path, _served(state, path, handler, api_key), methods=[method])
        for (method, path), handler in WIRE_ENDPOINTS.items()
    ]
    every = ["GET", "POST", "PUT", "DELETE", "PATCH"]
    routes.append(Route("/{path:path}", _unknown, methods=every))
    return Starlette(routes=routes, lifespan=lifespan)


def _served(
    state: WireState, path: str, handler: Handler, api_key: str | None
) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        try:
            if problem := problem_with_site(request.scope, any_host=api_key is not None):
                raise WireError(403, problem)
            if path != HEALTH:
                _authorize(request, api_key)
            body = await _body(request, state.limits.body_bytes)
            reply = await handler(state, request, body)
        except WireError as error:
            return _refusal(error.status, str(error))
        except EngineRequestError as error:
            return _refusal(400, str(error))
        except TinkerScriptError as error:
            logger.warning("wire.refused path=%s error=%s", path, error)
            return _refusal(500, str(error))
        if isinstance(reply, Response):
            return reply
        return Response(status_code=204) if reply is None else JSONResponse(reply)

    return serve


def _authorize(request: Request, api_key: str | None) -> None:
    given = request.headers.get("x-api-key", "")
    if not given:
        raise WireError(
            401, "X-API-Key: the header is missing; any key is accepted unless the server has one"
        )
    if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
        raise WireError(401, "X-API-Key: this is not the server's key")


async def _body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise WireError(413, f"the body is larger than {limit} bytes")
    return bytes(body)


async def _unknown(request: Request) -> Response:
    return _refusal(404, f"{request.method} {request.url.path}: the embedded engine has no such endpoint")


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"detail": message}, status_code=status)


async def _keep_house(state: WireState) -> None:
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        state.housekeeping()


ENGINE_KEY_VARIABLE = "TINKERSCRIPT_ENGINE_KEY"


@dataclass(frozen=True, slots=True)
class WireOptions:
    folder: Path
    state_dir: Path
    name: str
    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free port.
    full: bool = False  # Runs train all weights instead of adapters.
    threads: int = 1
    max_batch: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    activation_checkpointing: bool = False
    seed: int = 0
    limits: WireLimits = field(default_factory=WireLimits)


async def serve_wire(options: WireOptions, announce: Callable[[str], None]) -> None:
    """Serve until cancelled. `announce` gets the URL. Other machines need a key, or the address is
    refused."""
    key = os.environ.get(ENGINE_KEY_VARIABLE) or None
    if key is None and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines: set {ENGINE_KEY_VARIABLE} to the API "
            "key that clients must send (the SDK wants one that starts with tml-)"
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
            activation_checkpointing=options.activation_checkpointing,
            lora=None if options.full else UNUSED_ADAPTER,
        ) as engine,
    ):
        state = WireState(engine, options.state_dir, name=options.name, limits=options.limits)
        app = wire_app(state, api_key=key)
        server = http_server(app, InterchangeConfig(), lifespan="on", grace_s=ENGINE_GRACE_S, limits=LIMITS)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await server.ready.wait()
            announce(f"http://{options.host}:{listener.getsockname()[1]}")
            await asyncio.shield(serving)
        finally:
            state.futures.release_waiting()
            server.should_exit = True
            await serving


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
