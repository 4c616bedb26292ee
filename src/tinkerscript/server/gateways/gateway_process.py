"""A gateway process: the `tinkerscript gateway` command, which the server starts.

It answers the model calls of the claims that it owns, under its path, and holds their conversations. What it
knows of a claim it asks the server; what it has is what the server's store has, so it can die at any time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkerscript import tracing
from tinkerscript.asgi import Refusals, in_front
from tinkerscript.config import RunConfig
from tinkerscript.gateway.dialects import REFUSAL_BODIES
from tinkerscript.gateway.dialects.agent_mode import AGENT_PREFIX
from tinkerscript.gateway.gateway import Gateway, gateway_of
from tinkerscript.gateway.outside_server import outside_servers
from tinkerscript.gateway.samplers import RemoteSampler, remote_sampler
from tinkerscript.lifecycle import GRACE_S, exit_hard_after, shorten_collections, when_parent_ends
from tinkerscript.model_folder import model_folder
from tinkerscript.server.claims import gateway_path
from tinkerscript.server.gateways.channel import (
    Answer,
    AskRefused,
    Channel,
    ForgetClaim,
    Ready,
    Setup,
    StopServing,
    ToGateway,
)
from tinkerscript.server.gateways.remote_claims import RemoteClaims
from tinkerscript.server.http_server import http_server
from tinkerscript.server.passing import Door, PassOn
from tinkerscript.trainer_link.remote_sampling import LinkSampler


def run_gateway(number: int, *, channel: int, door: int) -> None:
    """Serve until the server says so or ends. `channel`, `door`: file descriptors of this process' ends.

    Raises ConfigError.
    """
    ends = socket.socket(fileno=channel), socket.socket(fileno=door)
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(GatewayProcess(number, os.environ).run(*ends))


class GatewayProcess:
    """What runs in the process. For one event loop."""

    def __init__(self, number: int, environ: Mapping[str, str]) -> None:
        self._path = gateway_path(number)
        self._environ = environ
        self._stop = asyncio.Event()
        self._setup: asyncio.Future[RunConfig] | None = None
        self._gateway: Gateway | None = None
        self._sampler: LinkSampler | None = None
        self._channel = Channel(ToGateway, self._take, self._stop.set)
        self._claims = RemoteClaims(self._channel.send)
        self._to_server: Door | None = None

    async def run(self, channel: socket.socket, door: socket.socket) -> None:
        """Serve until told to stop. Raises ConfigError for a config or an inference server that fails."""
        loop = asyncio.get_running_loop()
        self._setup = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        when_parent_ends(self._stop.set)
        await loop.create_unix_connection(lambda: self._channel, sock=channel)
        try:
            await self._serve(await self._setup, door)
        finally:
            self._channel.close()

    async def _serve(self, config: RunConfig, door: socket.socket) -> None:
        section = config.interchange_server
        async with (
            self._sampler_of(config) as sampler,
            outside_servers(config, self._environ, processes=section.processes) as outside,
        ):
            self._gateway = gateway_of(config, claims=self._claims, sampler=sampler, outside=outside)
            http = http_server(
                _traced(self._app(self._gateway, section.max_body_bytes)), section, self._route
            )
            serving = asyncio.create_task(http.serve(sockets=[]))
            try:
                await http.ready.wait()
                self._to_server = Door(door, http.adopt)
                shorten_collections()
                self._channel.send(Ready())
                await self._stop.wait()
            finally:
                exit_hard_after(2 * GRACE_S)
                sampler.close()
                for server in outside.values():
                    server.close()
                http.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)
                if self._to_server is not None:
                    self._to_server.close()

    @asynccontextmanager
    async def _sampler_of(self, config: RunConfig) -> AsyncGenerator[LinkSampler | RemoteSampler]:
        """The config's inference server, or the trainer behind the server's link."""
        timeout_s = config.interchange_server.call_timeout_s
        if not config.inference.samples_without_trainer:
            self._sampler = LinkSampler(self._channel, timeout_s=timeout_s)
            yield self._sampler
            return
        folder = model_folder(config.engine.model)
        async with remote_sampler(
            config.inference, model_folder=folder, environ=self._environ, timeout_s=timeout_s
        ) as sampler:
            yield sampler

    def _take(self, message: ToGateway) -> None:
        match message:
            case Answer() | AskRefused():
                self._claims.answered(message)
            case ForgetClaim():
                if self._gateway is not None:
                    self._gateway.forget(message.episode_uuid, message.attempt)
            case StopServing():
                self._stop.set()
            case Setup():
                assert self._setup is not None
                self._setup.set_result(RunConfig.model_validate_json(message.config))
            case _:
                assert self._sampler is not None
                self._sampler.message(message)

    def _route(self, target: bytes) -> PassOn | None:
        """Everything but this process' own calls goes back to the server."""
        own = (f"{self._path}/v1/".encode(), f"{self._path}{AGENT_PREFIX}/v1/".encode())
        if target.startswith(own) or self._to_server is None:
            return None
        return self._to_server.pass_on

    def _app(self, gateway: Gateway, max_body_bytes: int) -> ASGIApp:
        app = FastAPI(openapi_url=None)
        refusals = Refusals({f"{self._path}{path}": body for path, body in REFUSAL_BODIES.items()})
        refusals.install(app)
        routes = {f"{self._path}{path}": responder for path, responder in gateway.routes.items()}
        app.include_router(gateway.router, prefix=self._path)
        return in_front(app, models=routes, max_body_bytes=max_body_bytes, refusals=refusals)


def _traced(app: ASGIApp) -> ASGIApp:
    """The same; what it does for a request is under the span that the request names."""
    if not tracing.is_on():
        return app

    async def with_span(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tracing.came_with(Headers(scope=scope).get(tracing.HEADER, ""))
        await app(scope, receive, send)

    return with_span
