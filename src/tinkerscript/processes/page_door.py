"""The page of a run that has no server: a listening socket, and a page that is started when somebody calls.

Invariants: until the first connection, and after some minutes without one, there is a socket and nothing
else; the page ends with this process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tinkerscript.errors import ConfigError
from tinkerscript.lifecycle import describe_exit
from tinkerscript.server.addresses import http_url, listen_near
from tinkerscript.server.page_child import page_log, start_page, stop_page

PORT = 10086
"""That of the interchange server, which such a run does not have; another one if it is in use."""

PAUSE_S = 5.0
"""Before a page that died soon after its start is started again."""

STABLE_AFTER_S = 60.0
MAX_QUICK_DEATHS = 3
"""In a row. Then the page is given up, and the run goes on."""


@asynccontextmanager
async def page_door(
    run_dir: Path,
    note: Callable[[str], None],
    *,
    withheld: Collection[str] = (),
    pause_s: float = PAUSE_S,
) -> AsyncGenerator[str]:
    """The URL of the page of `run_dir`, on this machine alone, while the context is open. `withheld`:
    variables that the page's process does not get.

    Raises ConfigError if no port can be opened.
    """
    try:
        listener = listen_near("127.0.0.1", PORT)
    except OSError as error:
        raise ConfigError(f"cannot listen on 127.0.0.1 for the page: {error.strerror or error}") from error
    with listener:
        environ = {name: value for name, value in os.environ.items() if name not in withheld}
        serving = asyncio.create_task(_serve(run_dir, listener, note, environ, pause_s), name="page")
        try:
            yield http_url(listener)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def _serve(
    run_dir: Path,
    listener: socket.socket,
    note: Callable[[str], None],
    environ: Mapping[str, str],
    pause_s: float,
) -> None:
    """Start the page when somebody connects, and again when it has died and somebody does."""
    quick_deaths, reason = 0, ""
    while quick_deaths < MAX_QUICK_DEATHS:
        await _connection(listener)
        began = time.monotonic()
        try:
            code = await _page_ended(run_dir, listener, environ)
            reason = describe_exit(code)
        except OSError as error:
            code, reason = -1, str(error)
        quick_deaths = quick_deaths + 1 if code and time.monotonic() - began < STABLE_AFTER_S else 0
        await asyncio.sleep(pause_s if quick_deaths else 0.0)
    listener.close()  # Whoever waits at it is sent away.
    note(f"the page ended {quick_deaths} times ({reason}) and stays away; log: {page_log(run_dir)}")


async def _page_ended(run_dir: Path, listener: socket.socket, environ: Mapping[str, str]) -> int:
    """The exit code of a page that accepts the connections from now on. Raises OSError."""
    descriptor = listener.fileno()
    page = await start_page(run_dir, "--fd", str(descriptor), environ=environ, pass_fds=(descriptor,))
    try:
        return await page.wait()
    finally:
        await asyncio.shield(stop_page(page))


async def _connection(listener: socket.socket) -> None:
    """Return when a connection waits to be accepted, and leave it there."""
    loop = asyncio.get_running_loop()
    waits = asyncio.Event()
    loop.add_reader(listener, waits.set)
    try:
        await waits.wait()
    finally:
        loop.remove_reader(listener)
