"""`tinkerscript view`: the page of one run, or of all runs in a folder. Also the page as a child process."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from tinkerscript.dashboard.terminal import open_in_browser
from tinkerscript.errors import ConfigError
from tinkerscript.page.page_server import serve_page
from tinkerscript.record.reader import find_runs
from tinkerscript.server.addresses import http_url, listen, listen_near, remote_url
from tinkerscript.server.auth import ADMIN_TOKEN, FILE_SUFFIX, MIN_TOKEN_CHARS, is_loopback, read_token

DEFAULT_PORT = 10087


async def view_command(root: Path, console: Console, *, host: str, port: int | None, opens: bool) -> int:
    """Serve the page of the runs in `root` until cancelled. `port`: None for the default one or any other.

    Raises ConfigError: no runs, a port in use, an address that takes a token.
    """
    find_runs(root)
    check_reach(host, os.environ)
    try:
        listener = listen_near(host, DEFAULT_PORT) if port is None else listen(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    with listener:
        url = remote_url(http_url(listener), host)
        console.print(url, highlight=False, soft_wrap=True, markup=False)
        if opens:
            open_in_browser(http_url(listener), partial(console.print, highlight=False, soft_wrap=True))
        await serve_page(root, listener, environ=os.environ)
    return 0


def check_reach(host: str, environ: Mapping[str, str]) -> None:
    """Raises ConfigError for an address that other machines reach, if no good token protects the page."""
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


async def page_command(run_dir: Path, *, path: Path | None, fd: int | None, idle_s: float) -> int:
    """Serve the page of one run until cancelled or idle: on a new Unix socket, or on one that the parent
    passed."""
    listener = _unix_socket(path) if path is not None else socket.socket(fileno=fd)
    with listener:
        await serve_page(run_dir, listener, environ=os.environ, idle_s=idle_s)
    return 0


def _unix_socket(path: Path) -> socket.socket:
    """A listening socket for this user alone, in place of one that a dead process left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(128)
    return listener
