"""Connections that take their time, and too many of them: they end, and keep nobody else out."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from interchange_helpers import DEADLINE_S, eventually, new_episodes
from interchange_setup import Setup, serving
from tinkerscript.config import InterchangeConfig
from tinkerscript.http_server import (
    MIN_CONNECTIONS,
    OTHER_FILES,
    ConnectionLimits,
    connections_allowed,
    http_server,
)

HEAD = b"POST /claim_episode HTTP/1.1\r\nHost: localhost\r\n"
BODY = b"Content-Type: application/json\r\nContent-Length: 25\r\n\r\n"
AT_MOST_50 = ConnectionLimits(connections=50)
CLAIM = b'{"client_uuid": "slow" }  '[:25]


@asynccontextmanager
async def connected(setup: Setup, *sent: bytes) -> AsyncGenerator[asyncio.StreamReader]:
    """A connection over which this was sent."""
    host, port = setup.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in sent:
        writer.write(part)
        await writer.drain()
    async with asyncio.timeout(DEADLINE_S):
        yield reader
    writer.close()


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + BODY, HEAD + BODY + CLAIM[:-1]])
async def test_a_request_that_does_not_arrive_is_given_up(
    tmp_path: Path, byte_model: Path, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, byte_model, connections=ConnectionLimits(0.1, 0.1)) as setup:
        async with connected(setup, sent) as reader:
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        whole = HEAD + BODY + CLAIM
        async with connected(setup, *(whole[i : i + 40] for i in range(0, len(whole), 40))) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert "Exception in ASGI" not in caplog.text


async def test_slow_sockets_however_many_keep_nobody_out(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, connections=AT_MOST_50) as setup, AsyncExitStack() as stack:
        waiting = asyncio.create_task(setup.claim("long", wait_s=60))
        await setup.metric_becomes("tinkerscript_waiting_clients", 1)
        slow = [await stack.enter_async_context(connected(setup, HEAD)) for _ in range(200)]
        async with httpx.AsyncClient(base_url=setup.url, timeout=10) as stranger:
            assert (await stranger.get("/health")).status_code == 200
            kept = await stranger.post("/claim_episode", json={"client_uuid": "new"})
            assert kept.status_code == 200
        assert (await slow[0].read()).startswith(b"HTTP/1.1 503 "), "the oldest had to go"
        await setup.link.register(new_episodes("e"))
        assert (await waiting).episode_uuid == "e", "whoever waits for an answer stays"


@asynccontextmanager
async def unread(url: str, sent: bytes, *, buffer: int = 4096) -> AsyncGenerator[socket.socket]:
    """A connection whose client sends and does not read."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, sent)
        yield client


LONG_REPLY = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_clients_that_do_not_read_keep_nobody_out(tmp_path: Path, byte_model: Path) -> None:
    """More than there may be connections, each with requests for more than the kernel keeps of answers that
    nobody takes."""
    async with serving(tmp_path, byte_model, connections=AT_MOST_50) as setup, AsyncExitStack() as stack:
        await setup.link.register(new_episodes("e"))
        for _ in range(70):
            await stack.enter_async_context(unread(setup.url, 64 * LONG_REPLY))
        for _ in range(10):
            async with httpx.AsyncClient(base_url=setup.url, timeout=DEADLINE_S) as stranger:
                assert (await stranger.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=setup.url, timeout=DEADLINE_S) as worker:
            claimed = await worker.post("/claim_episode", json={"client_uuid": "new"})
            assert claimed.json()["success"]


async def test_an_answer_is_given_up_when_its_client_stops_reading() -> None:
    """Not before: a slow client gets all of it, which takes longer than it may read nothing."""
    length, begun = 8 * 2**20, list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(1)
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * length})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = http_server(app, InterchangeConfig(), limits=ConnectionLimits(body_s=0.5))
        serving_http = asyncio.create_task(http.serve(sockets=[listener]))
        await http.ready.wait()
        loop, read, began = asyncio.get_running_loop(), 0, time.monotonic()
        async with unread(url, 2 * LONG_REPLY) as silent, unread(url, LONG_REPLY, buffer=2**17) as slow:
            while read < length:
                if time.monotonic() - began < 1.2:
                    await asyncio.sleep(0.05)
                async with asyncio.timeout(DEADLINE_S):
                    got = len(await loop.sock_recv(slow, 2**18))
                assert got, "the slow client was given up"
                read += got
            await eventually(lambda: asyncio.sleep(0, len(http.server_state.connections) == 1), "one left")
            assert len(begun) == 2, "what waits behind an answer that is not read is not begun"
            assert silent.fileno() >= 0
        http.should_exit = True
        await serving_http


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: x\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
    ],
    ids=["a long header", "many headers", "a long path", "a header without an end"],
)
async def test_the_head_of_a_request_is_bounded(tmp_path: Path, byte_model: Path, sent: bytes) -> None:
    async with serving(tmp_path, byte_model) as setup:
        async with connected(setup, sent) as reader:
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        allowed = HEAD + b"X: " + b"x" * 60_000 + b"\r\n" + BODY + CLAIM
        async with connected(setup, allowed) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


def test_the_server_keeps_files_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, connections in ((256, 256 - OTHER_FILES), (64, MIN_CONNECTIONS)):

        def limit(_: int, files: int = files) -> tuple[int, int]:
            return files, 1 << 20

        monkeypatch.setattr("resource.getrlimit", limit)
        assert connections_allowed() == connections
