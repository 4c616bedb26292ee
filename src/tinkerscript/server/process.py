"""The server as a process.

A user's errors are found before the app is imported, which takes seconds. One server at a time serves a run
folder, and writes `server.json` once its addresses accept connections. With a shared ledger, servers of
several folders take turns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from tinkerscript import __version__
from tinkerscript.access_tokens import Roles
from tinkerscript.addresses import (
    SERVER_FILE,
    ServerInfo,
    bind_gateways,
    bind_http,
    bind_link,
    http_url,
    needs_link_keys,
    read_server_info,
)
from tinkerscript.asgi import Refusals
from tinkerscript.config import InterchangeConfig, RunConfig, load_config
from tinkerscript.errors import ConfigError, StoreError
from tinkerscript.files import is_disk_full, write_atomically
from tinkerscript.gateway.dialects import REFUSAL_BODIES
from tinkerscript.ledger import Ledger, open_ledger
from tinkerscript.lifecycle import (
    GRACE_S,
    collect_everything,
    exit_disk_full,
    exit_hard_after,
    shorten_collections,
    try_lock,
    when_parent_ends,
    without_garbage_collection,
)
from tinkerscript.limits import Totals
from tinkerscript.logs import now_about
from tinkerscript.model_folder import model_folder
from tinkerscript.protocol import HealthResponse
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.keys import KEYS_DIR, make_link_keys, pack_link_keys, unpack_link_keys

if TYPE_CHECKING:
    from tinkerscript.gateway.samplers import RemoteSampler
    from tinkerscript.http_server import ConnectionLimits
    from tinkerscript.server.app import InterchangeServer

LISTEN_RETRY_S = 0.5

STANDBY = "another server serves this run's episodes, or none does yet; try again"

logger = logging.getLogger(__name__)


@asynccontextmanager
async def running_server(
    config: RunConfig,
    run_dir: Path,
    *,
    environ: Mapping[str, str],
    serve_model: bool = False,
    times: LinkTimes | None = None,
    totals: Totals | None = None,
    connections: ConnectionLimits | None = None,
    gate: Gate | None = None,
) -> AsyncGenerator[tuple[ServerInfo, asyncio.Task[None]]]:
    """Serve `run_dir`. Yields the addresses, and a task that fails if the server does.

    With a shared ledger, the context opens at this server's first turn. `gate` is the app, for callers
    without a connection.
    """
    model_folder(config.engine.model)
    section = config.interchange_server
    _check_certificate(section)
    roles = Roles.of(section, environ, serve_model=serve_model)
    from tinkerscript.gateway.outside_server import outside_servers

    async with (
        _sampler_of(config, environ) as sampler,
        outside_servers(config, environ) as outside,
    ):
        lock = try_lock(run_dir / "server.lock")
        if lock is None:
            raise ConfigError(f"another interchange server already serves {run_dir}")
        previous = read_server_info(run_dir)
        with lock, bind_http(section, previous) as listener:
            with without_garbage_collection():  # First, so that taking over is fast.
                from tinkerscript.server.app import create_server

            create = partial(
                create_server,
                config,
                run_dir,
                roles=roles,
                serve_model=serve_model,
                environ=environ,
                remote_sampler=sampler,
                outside=outside,
                times=times,
                totals=totals,
            )
            gateways = section.processes if section.processes > 1 and not serve_model else 0
            terms = _Terms(
                section, run_dir, create, listener, previous, gateways, connections, gate or Gate()
            )
            running = asyncio.create_task(terms.run())
            try:
                await asyncio.wait((terms.began, running), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                yield terms.began.result(), running
            finally:
                await terms.finish_requests()
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    logger.info("server.stopped")


def _check_certificate(section: InterchangeConfig) -> None:
    if not section.tls_certificate:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            section.tls_certificate, section.tls_key or None
        )
    except (OSError, ssl.SSLError) as error:
        files = f"{section.tls_certificate!r} and {section.tls_key or section.tls_certificate!r}"
        raise ConfigError(f"interchange_server.tls_certificate, tls_key: {files}: {error}") from error


@asynccontextmanager
async def _sampler_of(config: RunConfig, environ: Mapping[str, str]) -> AsyncGenerator[RemoteSampler | None]:
    if not config.inference.samples_without_trainer:
        yield None
        return
    from tinkerscript.gateway.samplers import remote_sampler

    folder, timeout_s = model_folder(config.engine.model), config.interchange_server.call_timeout_s
    async with remote_sampler(
        config.inference, model_folder=folder, environ=environ, timeout_s=timeout_s
    ) as sampler:
        yield sampler


class Gate:
    """The process's ASGI app: the server's while it may serve, otherwise 503.

    Clients then try again; `/ready` shows a load balancer where to send them.
    """

    def __init__(self) -> None:
        self.server: InterchangeServer | None = None

        self._refusals = Refusals(REFUSAL_BODIES)

    def stop_waiting(self) -> None:
        if self.server is not None:
            self.server.stop_waiting()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.server is not None:
            await self.server.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope)(scope, receive, send)
        else:  # A websocket.
            await send({"type": "websocket.close", "code": 1013, "reason": STANDBY})

    def _answer(self, scope: Scope) -> JSONResponse:
        if scope["path"] == "/health":
            return JSONResponse(HealthResponse(version=__version__).model_dump())
        refusal = self._refusals.refuse(Request(scope), 503, STANDBY)
        # Load balancers choose a server per connection.
        refusal.headers["Connection"] = "close"
        return refusal


class _Terms:
    """A term ends with the first error; the next rereads the ledger."""

    def __init__(
        self,
        section: InterchangeConfig,
        run_dir: Path,
        create: Callable[..., Awaitable[InterchangeServer]],
        listener: socket.socket,
        previous: ServerInfo | None,
        gateways: int,
        connections: ConnectionLimits | None,
        gate: Gate,
    ) -> None:
        from tinkerscript.http_server import http_server

        self.began: asyncio.Future[ServerInfo] = asyncio.get_running_loop().create_future()

        self._section = section
        self._run_dir = run_dir
        self._create = create
        self._listener = listener
        self._previous = previous
        self._gateways = gateways
        self._gate = gate
        self._http = http_server(self._gate, section, limits=connections)
        self._serving: asyncio.Task[None] | None = None
        self._served = False

    async def run(self) -> None:
        said = ""
        try:
            while True:
                ledger = open_ledger(self._section.store, self._run_dir, self._section.durability)
                try:
                    await self._serve(ledger)
                except (StoreError, BaseExceptionGroup) as error:
                    reason = _lost_ledger(error)
                    if reason is None or not ledger.is_shared:
                        raise
                    if str(reason) != said:
                        logger.warning("server.stepped_down reason=%s", reason)
                    said = str(reason)
                finally:
                    await _close(ledger)
                await asyncio.sleep(LISTEN_RETRY_S)
                if self._served:
                    collect_everything()
                    self._served = False
        finally:
            if self._serving is not None:
                self._serving.cancel()
                await asyncio.gather(self._serving, return_exceptions=True)

    async def finish_requests(self) -> None:
        if self._gate.server is not None:
            await self._gate.server.until_end_is_known()
        self._gate.stop_waiting()
        self._http.should_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._gate.server is not None and self._gate.server.gateways is not None:
            await self._gate.server.gateways.ended()

    async def _serve(self, ledger: Ledger) -> None:
        if ledger.is_shared:
            self._start_http()
        epoch = await ledger.lead()
        if ledger.is_shared and needs_link_keys(self._section):
            folder = self._run_dir / KEYS_DIR
            make_link_keys(folder)
            unpack_link_keys(folder, await ledger.agree("link_keys", pack_link_keys(folder)))
        port = self._listener.getsockname()[1]
        with bind_gateways(self._section, self._gateways, port, self._previous) as listeners:
            server = await self._create(ledger=ledger, epoch=epoch, listeners=listeners)
            await self._serve_book(server, epoch)

    async def _serve_book(self, server: InterchangeServer, epoch: int) -> None:
        try:
            link_address, link_keys = bind_link(server.link, self._section, self._run_dir, self._previous)
        except ConfigError:
            server.link.close()
            raise
        info = ServerInfo(
            http_url(self._listener, tls=bool(self._section.tls_certificate)),
            link_address,
            os.getpid(),
            server.link.server_id,
            link_keys,
            _certificate(self._section),
            server.gateway_ports,
        )
        self._gate.server = server
        self._served = True
        background = asyncio.create_task(server.run())
        try:
            http = self._start_http()
            write_atomically(self._run_dir / SERVER_FILE, msgspec.json.encode(info).decode() + "\n")
            logger.info("server.listening url=%s link=%s epoch=%d", info.url, info.link_address, epoch)
            self._previous = info
            if not self.began.done():
                self.began.set_result(info)
            await _first_error(background, http)
        finally:
            self._gate.stop_waiting()
            self._gate.server = None
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)

    def _start_http(self) -> asyncio.Task[None]:
        if self._serving is None:
            self._serving = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        return self._serving


def _certificate(section: InterchangeConfig) -> str:
    return os.path.abspath(section.tls_certificate) if section.tls_certificate else ""


def _lost_ledger(error: BaseException) -> StoreError | None:
    """The StoreError in a term's error, if it contains no other."""
    if isinstance(error, BaseExceptionGroup):
        found = [_lost_ledger(each) for each in error.exceptions]
        return found[0] if None not in found else None
    return error if isinstance(error, StoreError) else None


async def _close(ledger: Ledger) -> None:
    """Only log a shared ledger's failure, because the next server continues."""
    try:
        await ledger.close()
    except StoreError as error:
        if not ledger.is_shared:
            raise
        logger.warning("ledger.lost reason=%s", error)


async def _first_error(*tasks: asyncio.Task[None]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def run_server(run_dir: Path, *, exit_with_parent: bool, serve_model: bool) -> None:
    """Serve until stopped (`tinkerscript server`). Exits with `DISK_FULL` for a full disk."""
    config = load_config(run_dir / "config.yaml")
    now_about(run=run_dir.resolve().name, whole_process=True)
    try:
        with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
            runner.run(
                serve_until_stopped(
                    config,
                    run_dir,
                    environ=os.environ,
                    exit_with_parent=exit_with_parent,
                    serve_model=serve_model,
                )
            )
    except Exception as error:
        if not is_disk_full(error):
            raise
        logger.warning("server.disk_full reason=%s", error)
        exit_disk_full()


async def serve_until_stopped(
    config: RunConfig,
    run_dir: Path,
    *,
    environ: Mapping[str, str],
    exit_with_parent: bool,
    serve_model: bool = False,
) -> None:
    """Serve until SIGTERM, SIGINT, or with `exit_with_parent` the end of standard input."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop_now(reason: str) -> None:
        logger.info("server.stopping reason=%s", reason)
        exit_hard_after(2 * GRACE_S)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_now, number.name)
    if exit_with_parent:
        when_parent_ends(lambda: stop_now("parent"))

    async def serve() -> None:
        async with running_server(config, run_dir, environ=environ, serve_model=serve_model) as (_, running):
            shorten_collections()
            await asyncio.wait((running,))
            running.result()

    serving, stopping = asyncio.create_task(serve()), asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not serving.done():
        serving.cancel()
        await asyncio.wait((serving,))
    if not serving.cancelled():
        serving.result()
