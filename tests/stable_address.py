"""`StableAddress`: a stand-in for the load balancer in front of servers of which one serves.

It passes the connections to each of its ports on to that port of the server whose `/ready` answers 200, and
ends those to any other server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import httpx

LOOK_S = 0.1
LIMIT_S = 1.0
"""A server that takes longer to say that it is ready is not."""


class _Side(asyncio.Protocol):
    """One of the two connections of a pair; what comes on one goes out on the other."""

    def __init__(self, address: StableAddress, place: int, other: _Side | None = None) -> None:
        self._address = address
        self._place = place
        self.other = other
        self.transport: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._address.sides.add(self)
        if self.other is None:
            self._address.tasks.add(asyncio.create_task(self._connect()))
        else:
            self.other.other = self
            for data in self.other.early:
                self.transport.write(data)

    async def _connect(self) -> None:
        ports = self._address.leader
        try:
            if ports is None:
                raise ConnectionError("no server is ready")
            await asyncio.get_running_loop().create_connection(
                lambda: _Side(self._address, self._place, self), "127.0.0.1", ports[self._place]
            )
        except OSError:
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._address.sides.discard(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


@dataclass(eq=False)
class StableAddress:
    """Listens while `stable_address` is open."""

    backends: Sequence[Sequence[int]]
    """The ports of each server: the first one answers `/ready`."""

    ports: list[int] = field(default_factory=list[int])
    """Where it listens, in the order of a server's ports."""

    leader: Sequence[int] | None = None
    sides: set[_Side] = field(default_factory=set[_Side])
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def link(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    async def follow(self) -> None:
        """Look for the server that serves, until cancelled."""
        async with httpx.AsyncClient(timeout=LIMIT_S) as http:
            while True:
                ready = await asyncio.gather(*(_is_ready(http, ports[0]) for ports in self.backends))
                leader = next((each for each, yes in zip(self.backends, ready, strict=True) if yes), None)
                if leader != self.leader:
                    self.leader = leader
                    self.hang_up()
                await asyncio.sleep(LOOK_S)

    def hang_up(self) -> None:
        """End all connections: half a reply must not look like all of it."""
        for side in list(self.sides):
            side.abort()


async def _is_ready(http: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
    except httpx.HTTPError:
        return False


@asynccontextmanager
async def stable_address(*backends: Sequence[int]) -> AsyncGenerator[StableAddress]:
    """One address for servers with these ports."""
    address, loop = StableAddress(backends), asyncio.get_running_loop()
    servers = [
        await loop.create_server(partial(_Side, address, place), "127.0.0.1", 0)
        for place in range(len(backends[0]))
    ]
    address.ports = [server.sockets[0].getsockname()[1] for server in servers]
    address.tasks.add(loop.create_task(address.follow()))
    try:
        yield address
    finally:
        for server in servers:
            server.close()
        for task in address.tasks:
            task.cancel()
        await asyncio.gather(*address.tasks, return_exceptions=True)
        address.hang_up()
        await asyncio.sleep(0)
