"""Between clients and server, and between trainer and server: what a bad network does.

    python tests/chaos/proxy.py --run-dir DIR --http-port P --link ADDRESS --seed S

HTTP: a request is sometimes delayed, delivered twice, or its reply is thrown away after the server has acted.
Link: frames are sometimes dropped, delayed (so that they overtake each other), or delivered twice. Where the
real server is, its `server.json` says; it is read again and again, since a restart may move it, and another
server may take over.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from evidence import Lines
from processes import serving_info

PROXY = "proxy.jsonl"
"""How often each fault was made."""

FOLLOW_S = 0.05


@dataclass
class Faults:
    """Draws the fate of each message."""

    rng: random.Random
    drop: float = 0.01
    twice: float = 0.02
    delay: float = 0.05
    longest_delay_s: float = 0.3
    made: Counter[str] = field(default_factory=Counter[str])

    def draw(self, where: str) -> str:
        """`drop`, `twice`, `delay` or `pass`."""
        roll = self.rng.random()
        for fate, share in (("drop", self.drop), ("twice", self.twice), ("delay", self.delay)):
            if roll < share:
                self.made[f"{where} {fate}"] += 1
                return fate
            roll -= share
        return "pass"

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, self.longest_delay_s))


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """One HTTP message with a Content-Length, or without a body."""
    head = await reader.readuntil(b"\r\n\r\n")
    _, found, rest = head.lower().partition(b"content-length:")
    length = int(rest.split(b"\r\n", 1)[0]) if found else 0
    return head + await reader.readexactly(length)


class HttpProxy:
    """One upstream connection for each request: the simplest thing that cannot mix replies up."""

    def __init__(self, run_dir: Path, faults: Faults) -> None:
        self._run_dir = run_dir
        self._faults = faults

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await read_message(reader)
                reply = await self._forward(request, reader)
                if reply is None:
                    return
                writer.write(reply)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return  # One of the two sides is gone; the client sees its connection close.
        finally:
            writer.close()

    async def _forward(self, request: bytes, client: asyncio.StreamReader) -> bytes | None:
        """The reply; None for one that is thrown away."""
        fate = self._faults.draw("http")
        if fate == "delay":
            await self._faults.wait()
        if fate == "twice":
            first, second = await asyncio.gather(self._ask(request), self._ask(request))
            return second if self._faults.rng.random() < 0.5 else first
        reply = await self._ask(request)
        return None if fate == "drop" else reply

    async def _ask(self, request: bytes) -> bytes:
        info = serving_info(self._run_dir)
        if info is None:
            raise ConnectionError("no server yet")
        port = int(info.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            await writer.drain()
            return await read_message(reader)
        finally:
            writer.close()


class LinkProxy:
    """A ROUTER for trainers, and toward the server one DEALER with the identity of each."""

    def __init__(self, run_dir: Path, faults: Faults) -> None:
        self._run_dir = run_dir
        self._faults = faults
        self._server = ""
        """The address of the dealers' server."""

        self._context = zmq.asyncio.Context()
        self._front: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._dealers: dict[bytes, zmq.asyncio.Socket] = {}
        self._tasks = set[asyncio.Task[None]]()

    async def run(self, address: str) -> None:
        self._front.bind(address)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._forward())

    async def _follow(self) -> None:
        """Hang up once another server serves; the trainer's next frame connects to that one."""
        while True:
            info = serving_info(self._run_dir)
            if info is not None and info.link_address != self._server:
                self._server = info.link_address
                self._hang_up()
            await asyncio.sleep(FOLLOW_S)

    async def _forward(self) -> None:
        while True:
            identity, *frames = await self._front.recv_multipart()
            dealer = self._dealers.get(identity) or self._connect(identity)
            self._spawn(self._deliver(lambda f=frames, d=dealer: d.send_multipart(f), "link to server"))

    def _hang_up(self) -> None:
        for former in self._dealers.values():
            former.close(linger=0)
        self._dealers.clear()

    def _connect(self, identity: bytes) -> zmq.asyncio.Socket:
        self._hang_up()  # A new trainer process: the one before is dead.
        dealer: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.connect(self._server)
        self._dealers[identity] = dealer
        self._spawn(self._back(identity, dealer))
        return dealer

    async def _back(self, identity: bytes, dealer: zmq.asyncio.Socket) -> None:
        while not dealer.closed:
            frames = await dealer.recv_multipart()
            parts = [identity, *frames]
            self._spawn(self._deliver(lambda p=parts: self._front.send_multipart(p), "link to trainer"))

    async def _deliver(self, send: Callable[[], Awaitable[object]], where: str) -> None:
        fate = self._faults.draw(where)
        if fate == "drop":
            return
        if fate == "delay":
            await self._faults.wait()
        for _ in range(2 if fate == "twice" else 1):
            await send()

    def _spawn(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except (zmq.ZMQError, asyncio.CancelledError):
                return  # The socket of a dead trainer was closed.

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def serve(options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    faults = Faults(rng)
    http = HttpProxy(options.run_dir, faults)
    log = Lines(options.run_dir / PROXY)
    server = await asyncio.start_server(http.serve, "127.0.0.1", options.http_port, backlog=2048)
    link = asyncio.create_task(LinkProxy(options.run_dir, faults).run(options.link))
    async with server:
        while not link.done():
            await asyncio.wait({link}, timeout=1.0)
            log.write(**msgspec.to_builtins(dict(faults.made)))
        link.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--link", required=True)
    parser.add_argument("--seed", type=int, required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
