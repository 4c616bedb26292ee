"""A gateway process (`tinkerscript gateway`), which the server starts, answers its claims' model calls on its
own port. It can die at any time, because the server's ledger has everything that it knows.
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
from starlette.types import ASGIApp

from tinkerscript.asgi import Refusals, SiteGuard, in_front
from tinkerscript.config import RunConfig
from tinkerscript.gateway.dialects import REFUSAL_BODIES
from tinkerscript.gateway.endpoint import Gateway, gateway_of
from tinkerscript.gateway.outside_server import outside_servers
from tinkerscript.gateway.samplers import RemoteSampler, remote_sampler
from tinkerscript.http_server import http_server
from tinkerscript.lifecycle import GRACE_S, exit_hard_after, shorten_collections, when_parent_ends
from tinkerscript.model_folder import model_folder
from tinkerscript.server.claims import gateway_path
from tinkerscript.server.gateway_channel import (
    Answer,
    AskRefused,
    Channel,
    ForgetClaim,
    Ready,
    RemoteClaims,
    Setup,
    StopServing,
    ToGateway,
)
from tinkerscript.trainer_link.remote_sampling import LinkSampler


def run_gateway(number: int, *, channel: int, listener: int) -> None:
    """`channel` and `listener` are file descriptors."""
    sockets = socket.socket(fileno=channel), socket.socket(fileno=listener)
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(GatewayProcess(number, os.environ).run(*sockets))


class GatewayProcess:
    def __init__(self, number: int, environ: Mapping[str, str]) -> None:
        self._path = gateway_path(number)
        self._environ = environ
        self._stop = asyncio.Event()
        self._setup: asyncio.Future[Setup] | None = None
        self._gateway: Gateway | None = None
        self._sampler: LinkSampler | None = None
        self._channel = Channel(ToGateway, self._take, self._stop.set)
        self._claims = RemoteClaims(self._channel.send)

    async def run(self, channel: socket.socket, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._setup = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        when_parent_ends(self._stop.set)
        await loop.create_unix_connection(lambda: self._channel, sock=channel)
        try:
            await self._serve(await self._setup, listener)
        finally:
            self._channel.close()

    async def _serve(self, setup: Setup, listener: socket.socket) -> None:
        config = RunConfig.model_validate_json(setup.config)
        section = config.interchange_server
        async with (
            self._sampler_of(config) as sampler,
            outside_servers(config, self._environ, processes=section.processes) as outside,
        ):
            self._gateway = gateway_of(config, claims=self._claims, sampler=sampler, outside=outside)
            app = self._app(self._gateway, any_host=setup.any_host)
            http = http_server(app, section)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            try:
                await http.ready.wait()
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

    @asynccontextmanager
    async def _sampler_of(self, config: RunConfig) -> AsyncGenerator[LinkSampler | RemoteSampler]:
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
                if self._gateway is not None:  # Earlier answers wake their waiters first.
                    loop = asyncio.get_running_loop()
                    loop.call_soon(self._gateway.forget, message.episode_uuid, message.attempt)
            case StopServing():
                self._stop.set()
            case Setup():
                assert self._setup is not None
                self._setup.set_result(message)
            case _:
                assert self._sampler is not None
                self._sampler.message(message)

    def _app(self, gateway: Gateway, *, any_host: bool) -> ASGIApp:
        app = FastAPI(openapi_url=None)
        refusals = Refusals({f"{self._path}{path}": body for path, body in REFUSAL_BODIES.items()})
        refusals.install(app)
        routes = {f"{self._path}{path}": responder for path, responder in gateway.routes.items()}
        app.include_router(gateway.router, prefix=self._path)
        front = in_front(app, models=routes, refusals=refusals)
        return SiteGuard(front, any_host=any_host, refusals=refusals)
