"""Serve a run's page from a child process, `tinkerscript view`.

A run neither waits for its page nor fails because of it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tinkerscript.access_tokens import ADMIN_TOKEN, MIN_TOKEN_CHARS, read_token
from tinkerscript.addresses import PAGE_PORT, http_url, listen, listen_near
from tinkerscript.config import InterchangeConfig, RunConfig
from tinkerscript.errors import WorkerError
from tinkerscript.ledger.reader import STORE_VARIABLE
from tinkerscript.processes.launcher import MAX_RESTARTS
from tinkerscript.processes.planned import page_process
from tinkerscript.processes.supervisor import Supervisor

THIS_MACHINE = "127.0.0.1"


@asynccontextmanager
async def run_page(
    config: RunConfig,
    folder: Path,
    note: Callable[[str], None],
    on_page: Callable[[str], object] | None,
    *,
    max_restarts: int = MAX_RESTARTS,
) -> AsyncGenerator[None]:
    """Announce the page's URL, also to `on_page`. `on_page=None` and `page_port: off` mean no page."""
    if on_page is None or config.page_port == "off":
        yield
        return
    async with Supervisor(max_restarts=0, note=note) as supervisor:
        try:
            listener, options = _listen(config)
        except OSError as error:
            note(f"the run has no page: cannot listen on port {config.page_port}: {error.strerror}")
            yield
            return
        with listener:
            # We hold the socket, so visitors wait while the page restarts.
            url = http_url(listener, tls=bool(options))
            note(f"watch the run at {url}")
            on_page(url)
            options = ["--fd", str(listener.fileno()), *options]
            page = page_process(config, folder, *options, max_restarts=max_restarts)
            child = page.child(folder, secrets={STORE_VARIABLE: config.interchange_server.store})
            child.fds = (listener.fileno(),)
            try:
                await supervisor.start(child)
            except OSError as error:
                supervisor.fail(error)
            watching = asyncio.create_task(_given_up(supervisor, listener, child.log, note), name="page")
            try:
                yield
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)


async def _given_up(
    supervisor: Supervisor, listener: socket.socket, log: Path, note: Callable[[str], None]
) -> None:
    try:
        await supervisor.failed()
    except (OSError, WorkerError) as error:
        listener.close()  # Otherwise visitors would wait forever.
        note(f"the run continues without its page: {str(error).splitlines()[0].rstrip(':;')} ({log})")


def _listen(config: RunConfig) -> tuple[socket.socket, list[str]]:
    """Return a listening socket, and the TLS options of `view`.

    It listens on the server's host if the admin token protects the page there. Otherwise it listens on this
    machine, as does a trainer without the address or certificate of a remote server.
    """
    section, port = config.interchange_server, config.page_port
    token = read_token(os.environ, ADMIN_TOKEN) or ""
    host = section.interchange_server_host if len(token) >= MIN_TOKEN_CHARS else THIS_MACHINE
    if host != THIS_MACHINE:
        try:
            options = _tls(section)
            return _bound(host, port), options
        except OSError:
            pass
    return _bound(THIS_MACHINE, port), []


def _bound(host: str, port: int | str) -> socket.socket:
    return listen(host, port) if isinstance(port, int) else listen_near(host, PAGE_PORT)


def _tls(section: InterchangeConfig) -> list[str]:
    files = {"--tls-certificate": section.tls_certificate, "--tls-key": section.tls_key}
    given = {option: str(Path(name).resolve(strict=True)) for option, name in files.items() if name}
    return [word for pair in given.items() for word in pair]
