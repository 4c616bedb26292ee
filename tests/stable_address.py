"""`StableAddress`: a stand-in for the load balancer in front of servers of which one serves.

It passes the connections to each of its ports on to that port of the server whose `/ready` answers 200, and
ends those to any other server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import httpx

LOOK_S = 0.1
LIMIT_S = 1.0
"""A server that takes longer to say that it is ready is not."""


@dataclass(eq=False)
class StableAddress:
    """Listens while `stable_address` is open."""

    backends: Sequence[Sequence[int]]
    """The ports of each server: the first one answers `/ready`."""

    ports: list[int] = field(default_factory=list[int])
    """Where it listens, in the order of a server's ports."""

    leader: Sequence[int] | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

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
        for writer in self.writers:
            writer.transport.abort()

    async def serve(self, place: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes on a connection to the port at `place`, and what is answered."""
        pair = {writer}
        try:
            if self.leader is not None:
                answers, server = await asyncio.open_connection("127.0.0.1", self.leader[place])
                pair.add(server)
                self.writers |= pair
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_pass(reader, server))
                    tasks.create_task(_pass(answers, writer))
        except* OSError:
            pass  # One of the two is gone; the other one sees its connection close.
        finally:
            self.writers -= pair
            for each in pair:
                each.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _is_ready(http: httpx.AsyncClient, port: int) -> bool:
    try:
        return (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
    except httpx.HTTPError:
        return False


@asynccontextmanager
async def stable_address(*backends: Sequence[int]) -> AsyncGenerator[StableAddress]:
    """One address for servers with these ports."""
    address = StableAddress(backends)
    servers = [
        await asyncio.start_server(partial(address.serve, place), "127.0.0.1", 0)
        for place in range(len(backends[0]))
    ]
    address.ports = [server.sockets[0].getsockname()[1] for server in servers]
    following = asyncio.create_task(address.follow())
    try:
        yield address
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        for server in servers:
            server.close()
        address.hang_up()
