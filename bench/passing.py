"""What it costs that several processes answer at one port: passing connections on, against a reverse proxy.

    python bench/passing.py [--rounds N] [--requests N]

Two processes with the server's HTTP, whose application answers 1 kB at once. 16 connections send 2 kB at a
time: all to the process that listens (`own`), all to the other one (`passed`: a connection is passed on
once), to both in turn (`mixed`: it is passed on for every request), and each on a connection of its own to
the first (`new_own`) and to the other one (`new`). `proxied` is a proxy in the listening process that copies
bytes between a connection and one of the other process without reading them: less than any real proxy does.
Processor time is the operating system's account of both processes, and of the listening one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import psutil
import uvloop
from starlette.types import Receive, Scope, Send

from load import connect
from tinkerscript.config import InterchangeConfig
from tinkerscript.server.addresses import listen
from tinkerscript.server.http_server import HttpServer, http_server
from tinkerscript.server.passing import Door, PassOn

OWN, OTHER = "/v1/x", "/g/1/v1/x"
CONNECTIONS = 16
REPLY, BODY = b"x" * 1000, b"y" * 2000


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", str(len(REPLY)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": REPLY})


@asynccontextmanager
async def serving(
    door: socket.socket, listeners: list[socket.socket], *, takes_other: bool
) -> AsyncGenerator[HttpServer]:
    """Answers one of the two paths, and gives connections with the other one away."""
    other: list[Door] = []

    def route(target: bytes) -> PassOn | None:
        return None if target.startswith(b"/g/") == takes_other else other[0].pass_on

    http = http_server(application, InterchangeConfig(), route)
    serving = asyncio.create_task(http.serve(sockets=listeners))
    await http.ready.wait()
    other.append(Door(door, http.adopt))
    try:
        yield http
    finally:
        http.should_exit = True
        await serving


class Copier(asyncio.Protocol):
    """One side of a connection of the proxy."""

    def __init__(self, upstream: int = 0) -> None:
        self._upstream = upstream
        self.peer: Copier | None = None
        self.transport: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._upstream:
            self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self.peer = await loop.create_connection(Copier, "127.0.0.1", self._upstream)
        self.peer.peer = self
        if self._early:
            self.data_received(self._early)

    def data_received(self, data: bytes) -> None:
        if self.peer is None or self.peer.transport is None:
            self._early += data
        else:
            self.peer.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.close()


async def child(door: int, listener: int) -> None:
    """The other process, until its standard input closes. It listens for the proxy too."""
    ends = socket.socket(fileno=door), socket.socket(fileno=listener)
    async with serving(ends[0], [ends[1]], takes_other=True):
        await asyncio.to_thread(sys.stdin.read)


async def main_process(door: int, listener: int, proxy: int, upstream: int) -> None:
    """The process that listens, until its standard input closes."""
    async with serving(socket.socket(fileno=door), [socket.socket(fileno=listener)], takes_other=False):
        copying = await asyncio.get_running_loop().create_server(
            lambda: Copier(upstream), sock=socket.socket(fileno=proxy)
        )
        await asyncio.to_thread(sys.stdin.read)
        copying.close()


async def ask(port: int, paths: list[str], requests: int, *, keep: bool = True) -> None:
    async def one_connection(count: int) -> None:
        (line,) = await connect(port, 1)
        for number in range(count):
            await line.ask(paths[number % len(paths)], BODY)
            if not keep:
                line.close()
                (line,) = await connect(port, 1)
        line.close()

    await asyncio.gather(*(one_connection(requests // CONNECTIONS) for _ in range(CONNECTIONS)))


def start(kind: str, *sockets: socket.socket, more: list[str]) -> Any:
    numbers = [str(each.fileno()) for each in sockets]
    return asyncio.create_subprocess_exec(
        *(sys.executable, __file__, f"--{kind}", *numbers, *more),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=[each.fileno() for each in sockets],
    )


async def bench(options: argparse.Namespace) -> None:
    doors, listeners = socket.socketpair(), [listen("127.0.0.1", 0) for _ in range(3)]
    port, proxy, upstream = (each.getsockname()[1] for each in listeners)
    started = [
        await start("child", doors[1], listeners[2], more=[]),
        await start("main", doors[0], listeners[0], listeners[1], more=[str(upstream)]),
    ]
    measured = [psutil.Process(process.pid) for process in started]
    loads = {
        "own": (port, [OWN], True),
        "passed": (port, [OTHER], True),
        "proxied": (proxy, [OTHER], True),
        "mixed": (port, [OWN, OTHER], True),
        "new_own": (port, [OWN], False),
        "new": (port, [OTHER], False),
    }
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds + 1):
        found: dict[str, float] = {}
        for name, (at, paths, keep) in loads.items():
            before = [sum(each.cpu_times()[:2]) for each in measured]
            await ask(at, paths, options.requests, keep=keep)
            after = [sum(each.cpu_times()[:2]) for each in measured]
            spent = [1e6 * (b - a) / options.requests for a, b in zip(before, after, strict=True)]
            found[f"{name}_us"], found[f"{name}_listening_us"] = sum(spent), spent[1]
        rounds.append(found)
    print(json.dumps({name: round(statistics.median(r[name] for r in rounds[1:])) for name in rounds[0]}))
    for process in started:
        process.stdin.close()
        await process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--main", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = bench(options)
    if options.child:
        work.close()
        work = child(*options.child)
    elif options.main:
        work.close()
        work = main_process(*options.main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
