"""The server's end of the link: a ROUTER socket that serves one trainer at a time.

The trainer that started last owns the server. Frames to a trainer start with the server's epoch.
Undeliverable frames are dropped, because important messages repeat.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from types import MappingProxyType

import zmq
import zmq.asyncio

from tinkerscript.errors import ConfigError, LinkError
from tinkerscript.trainer_link.framing import LinkTimes, Outbox, frames, read_to_server, set_options
from tinkerscript.trainer_link.keys import FailedHandshakes, LinkGuard, ServerKeys, secure_server
from tinkerscript.trainer_link.messages import (
    LINK_VERSION,
    Fetched,
    Hello,
    Refused,
    Register,
    RequestFailed,
    Resumed,
    Tagged,
    Tallied,
    ToServer,
    Welcome,
)

logger = logging.getLogger(__name__)


class TrainerEvent(Enum):
    CONNECTED = auto()
    SILENT = auto()  # For `LinkTimes.silence_s`.
    LOST = auto()  # For `LinkTimes.grace_s`.


LinkEvent = TrainerEvent | ToServer

LinkHandler = Callable[[LinkEvent], None]
"""Must not block. Answers each `Hello` with `ServerLink.welcome` once everything before is committed."""


class ServerLink:
    def __init__(
        self,
        *,
        server_id: str,
        epoch: int = 0,
        times: LinkTimes | None = None,
        count_drop: Callable[[str], None],
    ) -> None:
        """Trainers drop frames with a lower `epoch` than they have seen."""
        self.server_id = server_id
        self.epoch = epoch
        self.connected = False
        self._times = times or LinkTimes()
        self._count_drop = count_drop
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._guard: LinkGuard | None = None
        self._handshakes: FailedHandshakes | None = None
        self._outbox = Outbox()
        self.trainer_id = ""  # Empty before the first trainer.
        self.position = -1

        self._started_ns = 0
        self._refused: set[str] = set()
        self._heard = asyncio.Event()
        self._became_connected = asyncio.Event()

    def bind(self, address: str, keys: ServerKeys | None = None) -> str:
        """Bind `ipc://PATH` or `tcp://HOST:PORT` (`:*` takes a free port) and return the address.

        With `keys`, connections must prove the trainer's key (CURVE). After a ConfigError, `bind` may be
        called again.
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
        """Drops the message if no trainer is connected."""
        if self.connected:
            self._outbox.put(message)

    def welcome(self, number: int, quarantined: Mapping[str, str] = MappingProxyType({})) -> None:
        self.send(
            Welcome(
                link_version=LINK_VERSION,
                server_id=self.server_id,
                number=number,
                quarantined=dict(quarantined),
            )
        )

    async def run(self, handle: LinkHandler) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(handle))
                tasks.create_task(self._send())
                tasks.create_task(self._watch(handle))
                if self._handshakes is not None:
                    tasks.create_task(self._handshakes.run())
                if self._guard is not None:
                    tasks.create_task(self._guard.run())
        finally:
            self.close()

    def close(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
        self._socket.close(linger=0)
        if self._guard is not None:
            self._guard.close()
        self._context.term()

    async def _receive(self, handle: LinkHandler) -> None:
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
                if isinstance(message, Hello):
                    if await self._accept(identity, message):
                        self._on_hello(message, handle)
                elif self.connected and identity == self.trainer_id.encode():
                    self._heard.set()
                    handle(message)
                    if isinstance(message, Register):
                        await asyncio.sleep(0)  # A frame may have thousands of episodes.
                else:
                    name = type(message).__name__
                    self._drop("not_the_trainer", f"{name} before a Hello, or after a takeover")

    async def _accept(self, identity: bytes, hello: Hello) -> bool:
        problem = self._problem(identity, hello)
        if problem:
            self._drop("refused", problem)
            await self._send_to(identity, [Refused(reason=problem)])
        elif hello.trainer_id != self.trainer_id:
            await self._take_over(hello)
        return not problem

    def _on_hello(self, hello: Hello, handle: LinkHandler) -> None:
        self._heard.set()
        self.position = hello.position
        handle(hello)
        if not self.connected:
            self.connected = True
            logger.info("link.connected trainer_id=%s model=%s", hello.trainer_id, hello.model)
            self._became_connected.set()
            # A trainer drops a former server's requests when it meets a new one, so this comes first.
            self.welcome(number=0)
            handle(TrainerEvent.CONNECTED)

    def _problem(self, identity: bytes, hello: Hello) -> str:
        if hello.link_version != LINK_VERSION:
            return f"the server speaks link version {LINK_VERSION}, the trainer {hello.link_version}"
        if identity != hello.trainer_id.encode() or not hello.trainer_id:
            return "the trainer's socket must have its trainer_id as its identity"
        if hello.trainer_id in self._refused:
            return "another trainer took over this server"
        is_other = hello.trainer_id != self.trainer_id
        if is_other and self.connected and hello.started_ns < self._started_ns:
            return "a trainer that started later is connected to this server"
        return ""

    async def _take_over(self, hello: Hello) -> None:
        former, self.trainer_id = self.trainer_id, hello.trainer_id
        self._started_ns = hello.started_ns
        self._outbox.clear()
        self.connected = False
        if former:
            logger.warning("link.takeover trainer_id=%s former=%s", hello.trainer_id, former)
            self._refused.add(former)
            await self._send_to(former.encode(), [Refused(reason="another trainer took over this server")])

    async def _send(self) -> None:
        while True:
            messages = await self._outbox.take()
            await self._send_to(self.trainer_id.encode(), messages)

    async def _send_to(self, identity: bytes, messages: list[Tagged]) -> None:
        # Never wait, or a trainer that does not read could block its successor.
        for frame in frames(messages, self._drop):
            try:
                await self._socket.send_multipart([identity, b"%d" % self.epoch, frame], flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._drop("unsent", f"{len(messages)} messages: {error}")
                return

    async def _watch(self, handle: LinkHandler) -> None:
        while True:
            await self._until_connected()
            self._heard.clear()
            try:
                async with asyncio.timeout(self._times.silence_s):
                    await self._heard.wait()
            except TimeoutError:
                await self._lose_trainer(handle)

    async def _lose_trainer(self, handle: LinkHandler) -> None:
        self.connected = False
        self._outbox.clear()
        logger.warning("link.silent trainer_id=%s silence_s=%g", self.trainer_id, self._times.silence_s)
        handle(TrainerEvent.SILENT)
        try:
            async with asyncio.timeout(self._times.grace_s):
                await self._until_connected()
        except TimeoutError:
            handle(TrainerEvent.LOST)

    async def _until_connected(self) -> None:
        while not self.connected:
            self._became_connected.clear()
            await self._became_connected.wait()

    def _drop(self, reason: str, detail: str, message: Tagged | None = None) -> None:
        logger.warning("link.drop reason=%s detail=%s", reason, detail)
        self._count_drop(reason)
        if isinstance(message, Resumed | Fetched | Tallied):  # The trainer waits for the answer.
            self.send(RequestFailed(request_id=message.request_id, reason=f"the answer is lost: {detail}"))
