"""One address for servers that take turns: which of them a connection reaches, and what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from interchange_helpers import until
from serving import serving
from tinkerscript.client import TinkerScriptClient
from tinkerscript.client.server_relay import ServerRelay


@dataclass
class Turn:
    """A server that serves while it `is_leader`."""

    name: str
    is_leader: bool
    asked: int = 0
    app: FastAPI = field(default_factory=FastAPI)

    def __post_init__(self) -> None:
        self.app.get("/ready")(self.ready)
        self.app.get("/name")(lambda: self.name)
        self.app.get("/half")(self.half)

    async def ready(self) -> Response:
        self.asked += 1
        return Response(status_code=200 if self.is_leader else 503)

    async def half(self) -> StreamingResponse:
        async def begun() -> AsyncIterator[bytes]:
            yield b"the first half"
            await asyncio.Event().wait()

        return StreamingResponse(begun())


@pytest.fixture
def turns() -> Iterator[tuple[Turn, Turn, ServerRelay]]:
    one, two = Turn("one", is_leader=True), Turn("two", is_leader=False)
    with serving(one.app) as first, serving(two.app) as second:
        relay = ServerRelay([second, first])
        yield one, two, relay
        relay.close()


def change(one: Turn, two: Turn) -> None:
    one.is_leader, two.is_leader = two.is_leader, one.is_leader


def name(relay: ServerRelay) -> str:
    return httpx.get(f"{relay.url}/name", timeout=30).json()


async def test_a_connection_reaches_the_one_that_serves(turns: tuple[Turn, Turn, ServerRelay]) -> None:
    one, two, relay = turns
    assert {name(relay) for _ in range(5)} == {"one"}
    change(one, two)
    await until(lambda: name(relay) == "two", "the other one's turn")
    assert {name(relay) for _ in range(5)} == {"two"}


async def test_connections_to_the_former_one_end(turns: tuple[Turn, Turn, ServerRelay]) -> None:
    """Half a reply is an error for its reader."""
    one, two, relay = turns
    with httpx.stream("GET", f"{relay.url}/half", timeout=30) as reply:
        pieces = reply.iter_raw()
        assert next(pieces) == b"the first half"
        change(one, two)
        with pytest.raises(httpx.TransportError):
            next(pieces)
    assert name(relay) == "two"


async def test_a_connection_waits_for_a_server(turns: tuple[Turn, Turn, ServerRelay]) -> None:
    one, two, relay = turns
    one.is_leader = False
    before = two.asked
    await until(lambda: two.asked > before + 1, "it knows that none serves")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(name, relay)
        before = two.asked
        await until(lambda: two.asked > before + 1, "it goes on asking")
        assert not waiting.done()
        two.is_leader = True
        assert waiting.result(timeout=20) == "two"


def test_its_end_ends_all_connections(turns: tuple[Turn, Turn, ServerRelay]) -> None:
    _, _, relay = turns
    with httpx.stream("GET", f"{relay.url}/half", timeout=30) as reply:
        pieces = reply.iter_raw()
        assert next(pieces) == b"the first half"
        relay.close()
        with pytest.raises(httpx.TransportError):
            next(pieces)
    with pytest.raises(httpx.ConnectError):
        name(relay)
    relay.close()


def test_a_client_knows_one_address_of_several_servers(turns: tuple[Turn, Turn, ServerRelay]) -> None:
    _, _, relay = turns
    with pytest.raises(ValueError, match=r"'https://b' cannot be one of several servers.*http://HOST:PORT"):
        TinkerScriptClient("http://a:1, https://b/")
    with pytest.raises(ValueError, match="cannot be one of several"):
        TinkerScriptClient("http://a:1,http://b:2/path")
    with pytest.raises(ValueError, match="must start with http"):
        TinkerScriptClient("http://a:1,")
    urls = ", ".join(f"{each}/" for each in relay._servers)
    with TinkerScriptClient(urls, client_uuid="c") as client:
        assert client.settings.server_url == ",".join(relay._servers)
        own = client._connections
        assert own.request("GET", "/name").json() == "one"
        assert str(own.base_url).rstrip("/") not in relay._servers
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{own.base_url}/name")
