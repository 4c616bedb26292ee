"""The wire server on a thread, for the real SDK."""

from __future__ import annotations

import gc
import os
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import pytest
import tinker

from serving import serving
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.tinker_api.state import WireLimits, WireState
from tinkerscript.tinker_api.wire_server import UNUSED_ADAPTER, wire_app

KEY = "tml-test"

SDK_LEAVES_SOCKETS = pytest.mark.filterwarnings(
    # Of the SDK's own: the connection of its first request is left to the garbage collector.
    r"ignore:Exception ignored in. <(socket|function _Sel):pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True, scope="module")
def sockets_of_the_sdk(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collect them while the warnings about them are ignored, and not in the middle of some later test."""
    yield
    if SDK_LEAVES_SOCKETS.mark in request.node.iter_markers():
        gc.collect()


@dataclass
class Wire:
    url: str
    state: WireState
    services: list[tinker.ServiceClient] = field(default_factory=list)

    def service(self, **kwargs: Any) -> tinker.ServiceClient:
        self.services.append(tinker.ServiceClient(base_url=self.url, api_key=KEY, **kwargs))
        return self.services[-1]


@contextmanager
def wire_server(
    folder: Path,
    root: Path,
    *,
    limits: WireLimits | None = None,
    port: int = 0,
    name: str = "",
    key: str = "",
    full: bool = False,
    around: Callable[[Any], Any] = lambda app: app,
) -> Generator[Wire]:
    lora = None if full else UNUSED_ADAPTER
    with EmbeddedEngine(folder, checkpoint_dir=root / "checkpoints", seed=5, lora=lora) as engine:
        state = WireState(engine, root, name=name or str(folder), limits=limits or WireLimits(poll_s=1.0))
        with serving(around(wire_app(state, api_key=key or None)), port) as url:
            wire = Wire(url, state)
            yield wire
            for service in wire.services:
                service.close("success").result()
    gc.collect()


class AnswersInJson:
    """Makes a wire server one that knows no protobuf answers, by what it is asked to accept."""

    fetched = 0
    """Results fetched through it, in this process."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path", "").endswith("/retrieve_future"):
            type(self).fetched += 1
            kept = [header for header in scope["headers"] if header[0] != b"accept"]
            scope = scope | {"headers": [*kept, (b"accept", b"application/json")]}
        await self.app(scope, receive, send)


def prompt(*ids: int) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(list(ids))
