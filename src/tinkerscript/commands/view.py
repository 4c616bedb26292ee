from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from tinkerscript.access_tokens import ADMIN_TOKEN, FILE_SUFFIX, MIN_TOKEN_CHARS, is_loopback, read_token
from tinkerscript.addresses import PAGE_PORT, http_url, listen, listen_near, remote_url
from tinkerscript.config import InterchangeConfig
from tinkerscript.dashboard.terminal import open_in_browser
from tinkerscript.errors import ConfigError
from tinkerscript.http_server import http_server
from tinkerscript.ledger.reader import find_runs
from tinkerscript.lifecycle import shorten_collections
from tinkerscript.page.web_app import create_page

NICENESS = 10
"""Lets a run on this machine go first."""

PAGE_GRACE_S = 1
"""Seconds for open requests, such as event streams, to end."""


async def view_command(
    root: Path, console: Console, *, host: str, port: int | None, opens: bool, certificate: str, key: str
) -> int:
    """Serve the page of the runs in `root` until cancelled. `port` None prefers the default port."""
    find_runs(root)
    check_reach(host, os.environ)
    try:
        listener = listen_near(host, PAGE_PORT) if port is None else listen(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    url = http_url(listener, tls=bool(certificate))
    console.print(remote_url(url, host), highlight=False, soft_wrap=True, markup=False)
    if opens:
        open_in_browser(url, partial(console.print, highlight=False, soft_wrap=True))
    return await serve_page(root, listener, certificate=certificate, key=key)


async def serve_page(root: Path, listener: socket.socket, *, certificate: str = "", key: str = "") -> int:
    section = InterchangeConfig(
        tls_certificate=certificate, tls_key=key, trusted_proxies=["127.0.0.1", "::1"]
    )
    app = create_page(root, admin_token=read_token(os.environ, ADMIN_TOKEN))
    server = http_server(app, section, lifespan="on", grace_s=PAGE_GRACE_S)
    os.nice(NICENESS)
    shorten_collections()
    with listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await asyncio.shield(serving)
        finally:
            server.should_exit = True
            await serving
    return 0


def check_reach(host: str, environ: Mapping[str, str]) -> None:
    """Refuse an address at which other machines could reach the page without a good token."""
    if is_loopback(host):
        return
    token = read_token(environ, ADMIN_TOKEN)
    if token is None:
        raise ConfigError(
            f"--host {host} is reachable from other machines, so {ADMIN_TOKEN} must be set in the "
            f"environment, or {ADMIN_TOKEN}{FILE_SUFFIX} to a file with it (use a long random string)"
        )
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"--host {host} is reachable from other machines, so {ADMIN_TOKEN} must have at least "
            f"{MIN_TOKEN_CHARS} characters, not {len(token)}"
        )
