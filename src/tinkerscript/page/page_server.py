"""The page as a process: on a socket of its own, or behind the interchange server's."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkerscript.lifecycle import shorten_collections
from tinkerscript.page.runs import Runs
from tinkerscript.page.web_app import create_page
from tinkerscript.server.auth import ADMIN_TOKEN, read_token

GRACE_S = 2
LONGEST_SLEEP_S = 3600.0
logger = logging.getLogger(__name__)


class _Visits:
    """ASGI middleware that knows since when nobody has asked for anything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = 0
        self._last = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            self._last = time.monotonic()

    async def none_for(self, seconds: float) -> None:
        """Return once there has been none for so long."""
        while True:
            left = seconds if self._open else self._last + seconds - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(left, LONGEST_SLEEP_S))


class _PageServer(uvicorn.Server):
    """uvicorn without its signal handlers: who awaits `serve_page` cancels it."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve_page(
    root: Path, listener: socket.socket, *, environ: Mapping[str, str], idle_s: float = math.inf
) -> None:
    """Serve the page of the runs in `root` until cancelled, or until nobody has asked for anything for
    `idle_s` seconds. The admin token is in the environment."""
    app = _Visits(create_page(Runs(root), admin_token=read_token(environ, ADMIN_TOKEN)))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
        forwarded_allow_ips="*" if listener.family == socket.AF_UNIX else "127.0.0.1",
    )
    server = _PageServer(config)
    shorten_collections()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    idle = asyncio.create_task(app.none_for(idle_s))
    try:
        await asyncio.wait((serving, idle), return_when=asyncio.FIRST_COMPLETED)
        if idle.done():
            logger.info("page.idle: nobody has asked for anything for %.0f s", idle_s)
    finally:
        idle.cancel()
        server.should_exit = True
        await serving
