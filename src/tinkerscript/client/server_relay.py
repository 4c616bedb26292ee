"""`ServerRelay`: one address on this machine for servers that take turns (docs/failover.md).

Programs keep the base URL of their claim while another server takes over. The relay runs in a thread of its
own, so that it also serves a program that blocks its event loop.

Invariant: a connection goes to the server whose `/ready` answered 200 last, and ends once another one's does.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Coroutine, Sequence
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

logger = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
ASK_AGAIN_S = 0.2
"""While no server is known to serve."""

ANSWER_S = 2.0
"""A server that takes longer to say that it is ready counts as one that is not."""

HOLD_S = 20.0
"""A connection is closed if there is no server for it after that time."""

CHUNK_BYTES = 2**16


class ServerRelay:
    """Listens on this machine alone until it is closed. `url`: of the server that serves."""

    def __init__(self, servers: Sequence[str]) -> None:
        """`servers`: URLs with http:// and without a path."""
        self._servers = tuple(servers)
        self._leader: str | None = None
        self._is_led = asyncio.Event()
        self._open: dict[asyncio.Task[None], str | None] = {}
        """Each connection and its server; None while it waits for one."""

        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._running = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, name="server relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._running.cancel)
            self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with closing(self._loop), suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._running)

    async def _run(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener)
        try:
            async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
                while True:
                    await self._follow(http)
                    await asyncio.sleep(ASK_EVERY_S if self._is_led.is_set() else ASK_AGAIN_S)
        finally:
            server.close()
            await self._end(list(self._open))

    async def _follow(self, http: httpx.AsyncClient) -> None:
        """Find the server that serves; end the connections to any other."""
        leader = self._leader
        if leader is None or not await _is_ready(http, leader):
            states = await asyncio.gather(*(_is_ready(http, each) for each in self._servers))
            ready = (each for each, is_ready in zip(self._servers, states, strict=True) if is_ready)
            leader = next(ready, None)
        if leader != self._leader:
            logger.info("relay: %s", f"{leader} serves" if leader else f"{self._leader} does not serve")
        self._leader = leader
        if leader is None:
            self._is_led.clear()
            return
        self._is_led.set()
        await self._end([task for task, server in self._open.items() if server not in (None, leader)])

    async def _end(self, connections: list[asyncio.Task[None]]) -> None:
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._relay(reader, writer))
        self._open[task] = None
        task.add_done_callback(self._open.pop)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HOLD_S):
                their_reader, their_writer = await self._connect()
            try:
                await _until_one_ends(_pump(reader, their_writer), _pump(their_reader, writer))
            finally:
                their_writer.close()
        except OSError as error:  # Also a TimeoutError.
            logger.debug("relay: a connection is lost: %r", error)
            writer.transport.abort()  # What has come of a reply is not to look like all of it.
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        task = asyncio.current_task()
        assert task is not None
        while True:
            await self._is_led.wait()
            assert self._leader is not None
            self._open[task] = self._leader
            url = urlsplit(self._leader)
            try:
                return await asyncio.open_connection(url.hostname, url.port or 80)
            except OSError:
                self._open[task] = None
                self._is_led.clear()  # Until it is asked again.


async def _is_ready(http: httpx.AsyncClient, server: str) -> bool:
    try:
        return (await http.get(f"{server}/ready")).status_code == 200
    except httpx.HTTPError:
        return False


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


async def _until_one_ends(*pumps: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(pump) for pump in pumps]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
