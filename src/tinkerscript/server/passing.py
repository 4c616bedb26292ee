"""Connections that pass from one process of a server to another, so that all of them share one port.

The process that reads the beginning of a request and does not answer its path hands over the connection
itself: the file descriptor goes through a Unix socket, and with it what was read. The connection stays where
it went until it carries a request for somebody else. `bench/passing.py` compares this with a reverse proxy.

Invariants: a connection is passed on between two requests only, with every byte that was read of the next
one; a process that dies takes with it what it was given, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tinkerscript.asgi import ConnectionLimits, GuardedProtocol, guarded_protocol

TARGET_BYTES = 32
"""Bytes of a request's target that say whose it is."""

METHOD_BYTES = 16

Adopt = Callable[[socket.socket, bytes], None]
"""Answers a connection from now on, on which these bytes have arrived."""

PassOn = Callable[[int, bytes], None]
"""Gives a connection away: its file descriptor, which it closes, and what was read of its next request."""

Route = Callable[[bytes], PassOn | None]
"""From the beginning of a request's target to what answers it; None: this process."""

logger = logging.getLogger(__name__)


def hang_up(connection: socket.socket, arrived: bytes) -> None:
    """The `Adopt` of what answers nothing."""
    connection.close()


class Door:
    """One end of a pair of Unix sockets over which two processes pass connections to each other."""

    def __init__(self, end: socket.socket, adopt: Adopt) -> None:
        """Owns `end`. For the running event loop."""
        self._socket = end
        self._socket.setblocking(False)
        self._adopt = adopt
        self._waiting: deque[tuple[int, int]] = deque()
        """Connections that the other process has not read yet, each with a file of its bytes."""

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)

    def pass_on(self, connection: int, data: bytes) -> None:
        """Give `connection` to the other process. See `PassOn`."""
        read = os.memfd_create("request")
        with os.fdopen(read, "wb", closefd=False) as file:
            file.write(data)
        self._waiting.append((connection, read))
        if len(self._waiting) == 1:
            self._send()

    @property
    def waiting(self) -> int:
        """How many connections the other process has not taken."""
        return len(self._waiting)

    def _send(self) -> None:
        while self._waiting:
            try:
                socket.send_fds(self._socket, [b"c"], self._waiting[0])
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._send)
                return
            except OSError as error:  # The process has ended, or too many are on their way.
                logger.warning("connection.dropped reason=%s", error)
            for descriptor in self._waiting.popleft():
                os.close(descriptor)
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        while True:
            try:
                mark, descriptors, _, _ = socket.recv_fds(self._socket, 1, 2)
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("connection.unread reason=%s", error)
                mark, descriptors = b"", []
            if not mark:
                self._loop.remove_reader(self._socket)
                return
            self._take(descriptors)

    def _take(self, descriptors: list[int]) -> None:
        if len(descriptors) < 2:  # This process may open no more files.
            logger.warning("connection.dropped reason=too many open files")
        else:
            connection, read = descriptors.copy()
            descriptors = [read]
            data = os.pread(read, os.fstat(read).st_size, 0)
            self._adopt(socket.socket(fileno=connection), data)
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Drop what was not passed on yet."""
        if self._socket.fileno() == -1:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for descriptors in self._waiting:
            for descriptor in descriptors:
                os.close(descriptor)
        self._waiting.clear()


def passing_protocol(limits: ConnectionLimits, route: Route) -> type[GuardedProtocol]:
    """The class of the connections of a server that has only some of the paths."""
    base = guarded_protocol(limits)

    class Passing(base):
        arrived = b""
        """What was read of the first request before this process had the connection."""

        _held = b""
        """The beginning of a request, which does not say whose it is yet."""

        _arriving = False
        """Whether a request has begun to arrive, and has not arrived whole."""

        def on_message_begin(self) -> None:
            self._arriving = True
            super().on_message_begin()

        def on_message_complete(self) -> None:
            self._arriving = False
            super().on_message_complete()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if self.arrived:
                arrived, self.arrived = self.arrived, b""
                self.data_received(arrived)

        def data_received(self, data: bytes) -> None:
            if self._arriving or not _is_answered(self.cycle):
                super().data_received(data)
                return
            data = self._held + data
            target = _target(data)
            if target is None:
                self._held = data
                return
            self._held = b""
            pass_on = route(target)
            if pass_on is None:
                super().data_received(data)
            else:
                pass_on(os.dup(self.transport.get_extra_info("socket").fileno()), data)
                self.leave()

    return Passing


def _is_answered(cycle: RequestResponseCycle | None) -> bool:
    return cycle is None or cycle.response_complete


def _target(data: bytes) -> bytes | None:
    """The beginning of the request's target; None if more of the request has to arrive first."""
    _, space, rest = data[: METHOD_BYTES + TARGET_BYTES].partition(b" ")
    if not space:
        return None if len(data) < METHOD_BYTES else b""
    target, end, _ = rest.partition(b" ")
    return target if end or len(target) >= TARGET_BYTES else None
