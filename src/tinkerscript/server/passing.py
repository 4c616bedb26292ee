"""Connections that pass from one process of a server to another, so that all of them share one port.

The process that reads the beginning of a request and does not answer its path hands over the connection
itself: the file descriptor goes through a Unix socket, and with it what was read. The connection stays where
it went until it carries a request for somebody else. `bench/passing.py` compares this with a reverse proxy.

Invariant: a process that dies takes with it what it was given, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable

TAKEN_AT_ONCE = 8
"""Connections that are taken in a turn of the event loop."""

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
        for _ in range(TAKEN_AT_ONCE):  # The others in the next turns: each begins with a request.
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
