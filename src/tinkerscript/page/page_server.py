"""The page as a process: on a socket of its own, or behind the interchange server's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from tinkerscript.page.runs import Runs
from tinkerscript.page.web_app import create_page
from tinkerscript.server.auth import ADMIN_TOKEN, read_token

GRACE_S = 2


class _PageServer(uvicorn.Server):
    """uvicorn without its signal handlers: who awaits `serve_page` cancels it."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve_page(root: Path, listener: socket.socket, *, environ: Mapping[str, str]) -> None:
    """Serve the page of the runs in `root` until cancelled. The admin token is in the environment."""
    app = create_page(Runs(root), admin_token=read_token(environ, ADMIN_TOKEN))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
        forwarded_allow_ips="*" if listener.family == socket.AF_UNIX else "127.0.0.1",
    )
    server = _PageServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise
