"""The server's end of the link: a ROUTER socket, and which trainer is the server's.

Invariant: one trainer at a time. The `Hello` of a trainer that started later takes over; the one before is
told so and refused from then on. What a frame cannot deliver is counted and dropped: all that matters is
repeated until it is confirmed (see `messages`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq
import zmq.asyncio

from tinkerscript.errors import ConfigError, LinkError
from tinkerscript.trainer_link.framing import LinkTimes, Outbox, frames, read_to_server, set_options
from tinkerscript.trainer_link.keys import FailedHandshakes, LinkGuard, ServerKeys, secure_server
from tinkerscript.trainer_link.messages import (
    LINK_VERSION,
    Acknowledge,
    Cancel,
    Hello,
    Refused,
    Register,
    ReleaseClient,
    Sampled,
    SampleFailed,
    SampleProgress,
    Tagged,
    ToServer,
    Welcome,
)
from tinkerscript.waiting import Signal

logger = logging.getLogger(__name__)


FromTrainer = Register | Acknowledge | Cancel | ReleaseClient | Sampled | SampleProgress | SampleFailed


class LinkHandler(Protocol):
    """Who receives what the trainer says. Called on the event loop; must not block."""

    def trainer_connected(self) -> None:
        """A trainer is there, for the first time or again: it may have missed what was sent before."""
        ...

    def trainer_gone(self) -> None:
        """Nothing was heard of the trainer for too long."""
        ...

    def trainer_lost(self) -> None:
        """The trainer did not come back within the grace."""
        ...

    def hello(self, hello: Hello) -> None:
        """The trainer's state, at every heartbeat."""
        ...

    def message(self, message: FromTrainer) -> None:
        """Any other message of the trainer."""
        ...

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Run `callback` once all that the trainer sent before is committed."""
        ...


class ServerLink:
    """Binds, receives, sends, and watches the heartbeat. `run` owns its tasks."""

    def __init__(
        self, *, server_id: str, times: LinkTimes | None = None, count_drop: Callable[[str], None]
    ) -> None:
        """`count_drop(reason)` is told of every frame or message that is dropped."""
        self.server_id = server_id
        self.connected = False
        """Whether a trainer is there."""

        self._times = times or LinkTimes()
        self._count_drop = count_drop
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._guard: LinkGuard | None = None
        self._handshakes: FailedHandshakes | None = None
        self._outbox = Outbox()
        self._trainer_id = ""
        self._started_ns = 0
        self._refused: set[str] = set()
        self._heard = Signal()
        self._waiting_for_trainer = Signal()

    def bind(self, address: str, keys: ServerKeys | None = None) -> str:
        """Bind `ipc://PATH` or `tcp://HOST:PORT` (`:*` takes a free port); returns the address bound.

        With `keys` no connection is accepted but one that proves the trainer's key (CURVE).
        Raises ConfigError if the address cannot be used. May be called again then.
        """
        set_options(self._socket, address)
        if keys is not None:
            self._guard = self._guard or LinkGuard(self._context, keys)
            secure_server(self._socket, keys)
        self._handshakes = self._handshakes or FailedHandshakes(self._socket, address, self._count_drop)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"interchange_server: the link cannot bind {address}: {error}") from error
        if address.startswith("ipc://"):
            Path(address.removeprefix("ipc://")).chmod(0o600)
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return os.fsdecode(endpoint.rstrip(b"\0"))

    def send(self, message: Tagged) -> None:
        """Queue a message for the trainer; dropped if there is none."""
        if self.connected:
            self._outbox.put(message)

    async def _until_connected(self) -> None:
        """Return while a trainer is there."""
        while not self.connected:
            await self._waiting_for_trainer.wait()

    async def run(self, handler: LinkHandler) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(handler))
                tasks.create_task(self._send())
                tasks.create_task(self._watch(handler))
                if self._handshakes is not None:
                    tasks.create_task(self._handshakes.run())
                if self._guard is not None:
                    tasks.create_task(self._guard.run())
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket; queued messages are dropped. Repeatable."""
        if self._handshakes is not None:
            self._handshakes.close()
        self._socket.close(linger=0)
        if self._guard is not None:
            self._guard.close()
        self._context.term()

    async def _receive(self, handler: LinkHandler) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart()
            if len(parts) != 1:
                self._drop("malformed", f"{len(parts) + 1} parts in one frame")
                continue
            try:
                messages = read_to_server(parts[0])
            except LinkError as error:
                self._drop("malformed", str(error))
                continue
            for message in messages:
                await self._dispatch(identity, message, handler)

    async def _dispatch(self, identity: bytes, message: ToServer, handler: LinkHandler) -> None:
        if isinstance(message, Hello):
            await self._on_hello(identity, message, handler)
        elif self.connected and identity == self._trainer_id.encode():
            self._heard.fire()
            handler.message(message)
        else:
            self._drop("not_the_trainer", f"{type(message).__name__} before a Hello, or after a takeover")

    async def _on_hello(self, identity: bytes, hello: Hello, handler: LinkHandler) -> None:
        problem = self._problem(identity, hello)
        if problem:
            self._drop("refused", problem)
            await self._send_to(identity, [Refused(reason=problem)])
            return
        self._heard.fire()
        if hello.trainer_id != self._trainer_id:
            await self._take_over(hello)
        handler.hello(hello)
        if not self.connected:
            self.connected = True
            logger.info("link.connected trainer_id=%s model=%s", hello.trainer_id, hello.model)
            self._waiting_for_trainer.fire()
            # First of all: a trainer that learns of a new server drops what the last one asked for.
            self.send(self._welcome(number=0))
            handler.trainer_connected()
        handler.when_durable(lambda: self.send(self._welcome(hello.number)))

    def _welcome(self, number: int) -> Welcome:
        return Welcome(link_version=LINK_VERSION, server_id=self.server_id, number=number)

    def _problem(self, identity: bytes, hello: Hello) -> str:
        if hello.link_version != LINK_VERSION:
            return f"the server speaks link version {LINK_VERSION}, the trainer {hello.link_version}"
        if identity != hello.trainer_id.encode() or not hello.trainer_id:
            return "the trainer's socket must have its trainer_id as its identity"
        if hello.trainer_id in self._refused:
            return "another trainer took over this server"
        is_other = hello.trainer_id != self._trainer_id
        if is_other and self.connected and hello.started_ns < self._started_ns:
            return "a trainer that started later is connected to this server"
        return ""

    async def _take_over(self, hello: Hello) -> None:
        former, self._trainer_id = self._trainer_id, hello.trainer_id
        self._started_ns = hello.started_ns
        self._outbox.clear()
        self.connected = False
        if former:
            logger.warning("link.takeover trainer_id=%s former=%s", hello.trainer_id, former)
            self._refused.add(former)
            await self._send_to(former.encode(), [Refused(reason="another trainer took over this server")])

    async def _send(self) -> None:
        while True:
            await self._send_to_trainer(await self._outbox.take())

    async def _send_to_trainer(self, messages: list[Tagged]) -> None:
        await self._send_to(self._trainer_id.encode(), messages)

    async def _send_to(self, identity: bytes, messages: list[Tagged]) -> None:
        """Never waits: a trainer that does not read, or is gone, must not hold up the next one."""
        for frame in frames(messages):
            try:
                await self._socket.send_multipart([identity, frame], flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._drop("unsent", f"{len(messages)} messages: {error}")
                return

    async def _watch(self, handler: LinkHandler) -> None:
        while True:
            await self._until_connected()
            try:
                async with asyncio.timeout(self._times.silence_s):
                    await self._heard.wait()
            except TimeoutError:
                await self._lose_trainer(handler)

    async def _lose_trainer(self, handler: LinkHandler) -> None:
        self.connected = False
        self._outbox.clear()
        logger.warning("link.gone trainer_id=%s silence_s=%g", self._trainer_id, self._times.silence_s)
        handler.trainer_gone()
        try:
            async with asyncio.timeout(self._times.grace_s):
                await self._until_connected()
        except TimeoutError:
            handler.trainer_lost()

    def _drop(self, reason: str, detail: str) -> None:
        logger.warning("link.drop reason=%s detail=%s", reason, detail)
        self._count_drop(reason)
