"""uvicorn with the limits of the config: the HTTP of the server, and of each of its gateway processes."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tinkerscript.asgi import ConnectionLimits, guarded_protocol
from tinkerscript.config import InterchangeConfig
from tinkerscript.lifecycle import GRACE_S
from tinkerscript.server.passing import Route, passing_protocol

OTHER_FILES = 96
"""Open files that the server needs besides its HTTP connections."""

MIN_CONNECTIONS = 32

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. Longer than clients keep theirs (httpx and openai: 5 s), so
that none of them sends a request on a connection that the server is closing."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: what runs it owns the shutdown."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._adopting = set[asyncio.Task[None]]()
        self.ready = asyncio.Event()
        """Set when connections are welcome."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    def adopt(self, connection: socket.socket, arrived: bytes) -> None:
        """Answer a connection of another process, on which some bytes have arrived."""
        task = asyncio.create_task(self._adopt(connection, arrived))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def _adopt(self, connection: socket.socket, arrived: bytes) -> None:
        def protocol() -> Any:
            kind: Any = self.config.http_protocol_class
            made = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            made.arrived = arrived
            return made

        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # The client hung up.
            connection.close()


def http_server(app: ASGIApp, section: InterchangeConfig, route: Route | None = None) -> HttpServer:
    """Serves `app`. `route`: finds the connections that another process is to have; None: there are none."""
    limits = ConnectionLimits(
        header_s=section.header_timeout_s,
        body_s=section.body_timeout_s,
        connections=section.max_connections or connections_allowed(),
    )
    return HttpServer(
        uvicorn.Config(
            app,
            http=guarded_protocol(limits) if route is None else passing_protocol(limits, route),
            proxy_headers=bool(section.trusted_proxies),
            forwarded_allow_ips=section.trusted_proxies,
            ssl_certfile=section.tls_certificate or None,
            ssl_keyfile=section.tls_key or None,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=2048,
        )
    )


def connections_allowed() -> int:
    """Connections that the limit on open files leaves room for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_CONNECTIONS, files - OTHER_FILES)
