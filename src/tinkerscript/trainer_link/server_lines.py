"""`ServerLines`: a trainer's connections, to the one server of a run or to several that replace each other.

Invariant: of several servers the one with the highest epoch counts. What others say is dropped, so a server
that was stopped and goes on later, or that has lost its database, does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq
import zmq.asyncio

from tinkerscript.errors import LinkError
from tinkerscript.trainer_link.framing import MAX_QUEUED, frames, read_to_trainer, set_options
from tinkerscript.trainer_link.keys import FailedHandshakes, TrainerKeys, secure_trainer
from tinkerscript.trainer_link.messages import Hello, Tagged, ToTrainer

RECONNECT_MS = 200
"""Longest time between two attempts to reach one of several servers."""

logger = logging.getLogger(__name__)


class ServerLine(NamedTuple):
    """The connection to one server."""

    address: str
    socket: zmq.asyncio.Socket
    handshakes: FailedHandshakes


class ServerLines:
    """The lines to all servers, and the knowledge of which of them serves."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        addresses: Sequence[str],
        identity: bytes,
        keys: TrainerKeys | None,
        count_handshake: Callable[[str], None],
    ) -> None:
        """Connects. `count_handshake(reason)` is called for each connection that is refused."""
        self._several = len(addresses) > 1
        self.all = [self._connect(context, address, identity, keys, count_handshake) for address in addresses]
        self._epoch = 0
        self._leader = None if self._several else self.all[0]
        self._waiting: list[Tagged] = []
        """What is to be sent once a server is known to serve."""

    def _connect(
        self,
        context: zmq.asyncio.Context,
        address: str,
        identity: bytes,
        keys: TrainerKeys | None,
        count_handshake: Callable[[str], None],
    ) -> ServerLine:
        socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        set_options(socket, address)
        socket.setsockopt(zmq.IDENTITY, identity)
        if self._several:
            socket.setsockopt(zmq.IMMEDIATE, 1)  # Nothing is queued for a server that is not there.
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS)
        if keys is not None:
            secure_trainer(socket, keys)
        handshakes = FailedHandshakes(socket, address, count_handshake)
        socket.connect(address)
        return ServerLine(address, socket, handshakes)

    async def receive(self, line: ServerLine) -> list[ToTrainer]:
        """What the server that serves says next; nothing for what another one says, or nobody can read."""
        *before, frame = await line.socket.recv_multipart()
        try:
            epoch, messages = int(before[0]) if before else 0, read_to_trainer(frame)
        except (LinkError, ValueError) as error:
            logger.warning("link.drop reason=malformed detail=%s", error)
            return []
        if epoch > self._epoch or (epoch == self._epoch and self._leader is None):
            logger.info("link.follow address=%s epoch=%d", line.address, epoch)
            self._epoch, self._leader = epoch, line
        if epoch == self._epoch and line is self._leader:
            return messages
        logger.warning("link.drop reason=former_server address=%s epoch=%d", line.address, epoch)
        return []

    async def send(self, messages: Sequence[Tagged]) -> None:
        """All to the server that serves; to the others a `Hello`, which one that serves by now answers.

        With several servers it waits for none of them: what matters is repeated.
        """
        hellos = [message for message in messages if isinstance(message, Hello)]
        for line in self.all:
            if line is not self._leader and hellos:
                await self._try(line, hellos[-1:])
        if self._leader is None:
            self._waiting = [*self._waiting, *messages][-MAX_QUEUED:]
            return
        messages, self._waiting = [*self._waiting, *messages], []
        if self._several:
            await self._try(self._leader, messages)
            return
        for frame in frames(messages):
            await self._leader.socket.send(frame)

    async def _try(self, line: ServerLine, messages: Sequence[Tagged]) -> None:
        for frame in frames(messages):
            try:
                await line.socket.send(frame, flags=zmq.NOBLOCK)
            except zmq.Again:  # Nobody is there, or too much is on its way.
                logger.debug("link.unsent address=%s messages=%d", line.address, len(messages))
                return

    def close(self) -> None:
        """Close the sockets; what is on its way is dropped."""
        for line in self.all:
            line.handshakes.close()
            line.socket.close(linger=0)
