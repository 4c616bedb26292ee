"""The server as a process: one run folder, one HTTP socket, one link, a graceful shutdown.

What a user can put right (the model, the tokens, the port) is checked before the app is imported, which takes
seconds.

Invariant: one server at a time serves a run folder (a lock that dies with the process), and `server.json`
is written once its addresses accept connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn

from tinkerscript.config import InterchangeConfig, RunConfig, load_config
from tinkerscript.errors import ConfigError
from tinkerscript.files import write_atomically
from tinkerscript.lifecycle import (
    exit_hard_after,
    shorten_collections,
    try_lock,
    when_parent_ends,
    without_garbage_collection,
)
from tinkerscript.model_folder import model_folder
from tinkerscript.server.addresses import (
    SERVER_FILE,
    ServerInfo,
    bind_http,
    bind_link,
    http_url,
    read_server_info,
)
from tinkerscript.server.auth import Roles
from tinkerscript.server.store import open_store
from tinkerscript.server.store.episode_store import EpisodeStore
from tinkerscript.trainer_link.framing import LinkTimes

if TYPE_CHECKING:
    from tinkerscript.gateway.samplers import RemoteSampler
    from tinkerscript.server.app import InterchangeServer

OTHER_FILES = 96
"""Open files that the server needs besides its HTTP connections."""

MIN_CONNECTIONS = 32

GRACE_S = 5
"""Seconds that open requests may take to finish at shutdown; after twice that the process exits hard."""

KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open. Longer than clients keep theirs (httpx and openai: 5 s), so
that none of them sends a request on a connection that the server is closing."""

logger = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: `serve_until_stopped` owns the shutdown."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@asynccontextmanager
async def running_server(
    config: RunConfig,
    run_dir: Path,
    *,
    environ: Mapping[str, str],
    serve_model: bool = False,
    times: LinkTimes | None = None,
) -> AsyncGenerator[tuple[ServerInfo, asyncio.Task[None]]]:
    """Serve `run_dir` while the context is open; gives the addresses, and a task that fails if the server
    does.

    Raises ConfigError (a port in use, a missing token, a folder that is served already, an inference server
    that cannot be used) and StoreError.
    """
    model_folder(config.engine.model)
    _check_certificate(config.interchange_server)
    roles = Roles.of(config.interchange_server, environ, serve_model=serve_model)
    async with _sampler_of(config, environ) as sampler:

        async def create(store: EpisodeStore) -> InterchangeServer:
            with without_garbage_collection():
                from tinkerscript.server.app import create_server

            return await create_server(
                config,
                run_dir,
                store=store,
                roles=roles,
                serve_model=serve_model,
                environ=environ,
                remote_sampler=sampler,
                times=times,
            )

        async with _listening(config.interchange_server, run_dir, create) as running:
            yield running


def _check_certificate(section: InterchangeConfig) -> None:
    """Raises ConfigError for a certificate or key that cannot be used."""
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
    """The sampler of the config's inference server; None if the trainer's engine samples."""
    if not config.inference.samples_without_trainer:
        yield None
        return
    from tinkerscript.gateway.samplers import remote_sampler

    folder, timeout_s = model_folder(config.engine.model), config.interchange_server.call_timeout_s
    async with remote_sampler(
        config.inference, model_folder=folder, environ=environ, timeout_s=timeout_s
    ) as sampler:
        yield sampler


@asynccontextmanager
async def _listening(
    section: InterchangeConfig, run_dir: Path, create: Callable[[EpisodeStore], Awaitable[InterchangeServer]]
) -> AsyncGenerator[tuple[ServerInfo, asyncio.Task[None]]]:
    """What `create` makes, on its socket and its link."""
    lock = try_lock(run_dir / "server.lock")
    if lock is None:
        raise ConfigError(f"another interchange server already serves {run_dir}")
    with lock:
        previous = read_server_info(run_dir)
        with bind_http(section, previous) as listener:
            store = open_store(section.store, run_dir, section.durability)
            try:
                server = await create(store)
                try:
                    link_address, link_keys = bind_link(server.link, section, run_dir, previous)
                except ConfigError:
                    server.link.close()
                    raise
                info = ServerInfo(
                    http_url(listener, tls=bool(section.tls_certificate)),
                    link_address,
                    os.getpid(),
                    server.link.server_id,
                    link_keys,
                )
                async with _serving(server, listener, section) as task:
                    write_atomically(run_dir / SERVER_FILE, msgspec.json.encode(info).decode() + "\n")
                    logger.info("server.listening url=%s link=%s", info.url, info.link_address)
                    yield info, task
            finally:
                await store.close()
    logger.info("server.stopped")


@asynccontextmanager
async def _serving(
    server: InterchangeServer, listener: socket.socket, section: InterchangeConfig
) -> AsyncGenerator[asyncio.Task[None]]:
    """Run HTTP and the background tasks. At shutdown the requests finish first, since they need the tasks."""
    from tinkerscript.asgi import ConnectionLimits, guarded_protocol

    limits = ConnectionLimits(
        header_s=section.header_timeout_s,
        body_s=section.body_timeout_s,
        connections=section.max_connections or connections_allowed(),
    )
    http = _HttpServer(
        uvicorn.Config(
            server.app,
            http=guarded_protocol(limits),
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
    background = asyncio.create_task(server.run())
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    both = asyncio.create_task(_first_error(background, serving))
    try:
        yield both
    finally:
        server.stop_waiting()
        http.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        background.cancel()
        await asyncio.gather(background, both, return_exceptions=True)


def connections_allowed() -> int:
    """Connections that the limit on open files leaves room for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_CONNECTIONS, files - OTHER_FILES)


async def _first_error(*tasks: asyncio.Task[None]) -> None:
    """Return when one of the tasks ends, or raise its error."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def run_server(run_dir: Path, *, exit_with_parent: bool, serve_model: bool) -> None:
    """Run the interchange server of a folder until it is stopped: the `tinkerscript server` command.

    Reads config.yaml, restores server.sqlite, and writes server.json once it listens. Raises ConfigError and
    StoreError.
    """
    config = load_config(run_dir / "config.yaml")
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(
            serve_until_stopped(
                config,
                run_dir,
                environ=os.environ,
                exit_with_parent=exit_with_parent,
                serve_model=serve_model,
            )
        )


async def serve_until_stopped(
    config: RunConfig,
    run_dir: Path,
    *,
    environ: Mapping[str, str],
    exit_with_parent: bool,
    serve_model: bool = False,
) -> None:
    """Serve until SIGTERM, SIGINT, or with `exit_with_parent` the end of standard input.

    Raises the error of a server that fails.
    """
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
    async with running_server(config, run_dir, environ=environ, serve_model=serve_model) as (_, task):
        shorten_collections()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            task.result()
