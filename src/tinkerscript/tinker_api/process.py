"""The Tinker server as a process: engine, uvicorn over `wire_app`, and the key that an open port needs."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import uvicorn

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.errors import ConfigError
from tinkerscript.tinker_api.app import wire_app
from tinkerscript.tinker_api.state import WireLimits, WireState

KEY_VARIABLE = "TINKERSCRIPT_ENGINE_KEY"
"""Environment variable: the only API key that the server lets in."""


@dataclass(frozen=True, slots=True)
class WireOptions:
    """Where the server listens and what it serves."""

    folder: Path
    """The base model's folder."""

    state_dir: Path
    """Where sessions and checkpoints are kept."""

    name: str
    """What clients call the model."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free one."""

    threads: int = 1
    max_batch: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    limits: WireLimits = field(default_factory=WireLimits)


async def serve_wire(options: WireOptions, announce: Callable[[str], None]) -> None:
    """Serve until cancelled; `announce` is called with the URL once the server listens.

    Raises ConfigError for an address that is taken, or open to other machines without a key.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not _loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines: set {KEY_VARIABLE} to the API key "
            "that clients must send (the SDK wants one that starts with tml-)"
        )
    listener = _listener(options.host, options.port)
    with (
        listener,
        EmbeddedEngine(
            options.folder,
            checkpoint_dir=options.state_dir / "checkpoints",
            seed=options.seed,
            threads=options.threads,
            max_batch=options.max_batch,
            device=options.device,
            dtype=options.dtype,
        ) as engine,
    ):
        state = WireState(engine, options.state_dir, name=options.name, limits=options.limits)
        config = uvicorn.Config(
            wire_app(state, api_key=key), log_level="warning", timeout_graceful_shutdown=2
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await server.listening.wait()
            announce(f"http://{options.host}:{listener.getsockname()[1]}")
            await asyncio.shield(serving)
        finally:
            state.futures.release_waiting()
            server.should_exit = True
            await serving


class _Server(uvicorn.Server):
    """Sets `listening` once it listens, and leaves signals to the command."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """The command has signal handlers of its own."""
        yield


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
