"""Connections that take their time, and too many of them: they end, and keep nobody else out."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from interchange_helpers import DEADLINE_S, new_episodes
from interchange_setup import Setup, serving
from tinkerscript.asgi import Caller
from tinkerscript.config import InterchangeConfig
from tinkerscript.server.http_server import (
    MIN_CONNECTIONS,
    OTHER_FILES,
    connections_allowed,
    http_server,
)
from tinkerscript.server.passing import TAKEN_AT_ONCE, Door, hang_up

HEAD = b"POST /claim_episode HTTP/1.1\r\nHost: x\r\n"
BODY = b"Content-Type: application/json\r\nContent-Length: 25\r\n\r\n"
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
    async with serving(tmp_path, byte_model, header_timeout_s=0.1, body_timeout_s=0.1) as setup:
        async with connected(setup, sent) as reader:
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        whole = HEAD + BODY + CLAIM
        async with connected(setup, *(whole[i : i + 40] for i in range(0, len(whole), 40))) as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
    assert "Exception in ASGI" not in caplog.text


async def test_slow_sockets_however_many_keep_nobody_out(tmp_path: Path, byte_model: Path) -> None:
    async with serving(tmp_path, byte_model, max_connections=50) as setup, AsyncExitStack() as stack:
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


async def test_a_caller_that_hangs_up_is_noticed() -> None:
    begun, noticed = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        caller = Caller(scope, receive, send)
        assert await caller.body() == CLAIM
        assert not await caller.is_disconnected()
        begun.set()
        assert await caller.until_disconnect(asyncio.Event().wait()) is None
        assert await caller.is_disconnected()
        assert asyncio.all_tasks() == before | {asyncio.current_task()}, "nobody watches the connection"
        noticed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = http_server(app, InterchangeConfig())
        serving_http = asyncio.create_task(http.serve(sockets=[listener]))
        await http.ready.wait()
        before = asyncio.all_tasks()
        _, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(DEADLINE_S):
            writer.write(HEAD + BODY + CLAIM)
            await begun.wait()
            writer.close()
            await noticed.wait()
        http.should_exit = True
        await serving_http


def test_many_that_connect_at_once_do_not_wait_for_each_other() -> None:
    """A turn of the loop may take milliseconds."""
    number = 64

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("nothing is asked")

    async def accept_all() -> int:
        with socket.create_server(("127.0.0.1", 0), backlog=number) as listener, ExitStack() as callers:
            http = http_server(app, InterchangeConfig())
            serving_http = asyncio.create_task(http.serve(sockets=[listener]))
            await http.ready.wait()
            for _ in range(number):
                callers.enter_context(socket.create_connection(listener.getsockname()))
            turns = 0
            async with asyncio.timeout(DEADLINE_S):
                while len(http.server_state.connections) < number:
                    await asyncio.sleep(0)
                    turns += 1
            http.should_exit = True
            await serving_http
        return turns

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(accept_all()) <= number / 2


async def test_connections_that_pass_together_are_taken_over_several_turns() -> None:
    """Each comes with the beginning of a request, which takes its time."""
    taken = list[bytes]()

    def adopt(connection: socket.socket, arrived: bytes) -> None:
        connection.close()
        taken.append(arrived)

    ours, theirs = socket.socketpair()
    giving, taking = Door(ours, hang_up), Door(theirs, adopt)
    mine, yours = socket.socketpair()
    passed = [b"%d" % number for number in range(5 * TAKEN_AT_ONCE)]
    for each in passed:
        giving.pass_on(os.dup(mine.fileno()), each)
    counts = [0]
    async with asyncio.timeout(DEADLINE_S):
        while len(taken) < len(passed):
            await asyncio.sleep(0)
            counts.append(len(taken))
    assert taken == passed, "in order"
    assert max(after - before for before, after in itertools.pairwise(counts)) <= TAKEN_AT_ONCE
    for each in (giving, taking, mine, yours):
        each.close()


def test_the_server_keeps_files_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, connections in ((256, 256 - OTHER_FILES), (64, MIN_CONNECTIONS)):

        def limit(_: int, files: int = files) -> tuple[int, int]:
            return files, 1 << 20

        monkeypatch.setattr("resource.getrlimit", limit)
        assert connections_allowed() == connections
