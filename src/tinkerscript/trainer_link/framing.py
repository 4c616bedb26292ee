"""Framing, socket options, intervals and send queue for both ends of the link.

A frame is a msgpack list of messages. A malformed message is dropped alone; a frame without a readable one
raises LinkError. Every queue is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq.asyncio

from tinkerscript.errors import LinkError
from tinkerscript.trainer_link.messages import Tagged, ToServer, ToTrainer

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 256 * 2**20  # A larger frame disconnects the peer.
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 2**20  # Leaves room for the list.
FULL_FRAME_BYTES = 4 * 2**20
MAX_QUEUED = 100_000  # The oldest are dropped beyond it.


@dataclass(frozen=True, slots=True)
class LinkTimes:
    heartbeat_s: float = 1.0  # Between `Hello`s.
    silence_s: float = 5.0  # After which a trainer is disconnected.
    grace_s: float = 10.0  # How long a model call waits for a trainer.
    resend_s: float = 5.0  # After which unconfirmed messages repeat.


_encode = msgspec.msgpack.Encoder().encode
_decode_to_server = msgspec.msgpack.Decoder(list[ToServer]).decode
_decode_to_trainer = msgspec.msgpack.Decoder(list[ToTrainer]).decode
_split = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


def _log_drop(reason: str, detail: str, _: Tagged | None = None) -> None:
    logger.warning("link.drop reason=%s detail=%s", reason, detail)


def frames(
    messages: Iterable[Tagged], drop: Callable[[str, str, Tagged], None] = _log_drop
) -> Iterator[bytes]:
    """Pack messages into frames, in order; `drop` gets unsendable ones."""
    parts, size = list[msgspec.Raw](), 0
    for message in messages:
        try:
            encoded = _encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            drop("unencodable", f"{type(message).__name__}: {error}", message)
            continue
        # It would end the connection at every repetition.
        if len(encoded) > MAX_MESSAGE_BYTES:
            size_and_limit = f"{len(encoded)} bytes; a message carries {MAX_MESSAGE_BYTES}"
            drop("too_large", f"{type(message).__name__} of {size_and_limit}", message)
            continue
        if parts and size + len(encoded) > MAX_MESSAGE_BYTES:
            yield _encode(parts)
            parts, size = [], 0
        parts.append(msgspec.Raw(encoded))
        size += len(encoded)
        if size >= FULL_FRAME_BYTES:
            yield _encode(parts)
            parts, size = [], 0
    if parts:
        yield _encode(parts)


def read_to_server(frame: bytes) -> list[ToServer]:
    return _read(frame, _decode_to_server)


def read_to_trainer(frame: bytes) -> list[ToTrainer]:
    return _read(frame, _decode_to_trainer)


def _read(frame: bytes, decode: Callable[[bytes], list[T]]) -> list[T]:
    try:
        return decode(frame)
    except _MALFORMED as error:
        if found := list(_each(frame, decode)):
            return found
        raise LinkError(f"malformed frame of {len(frame)} bytes: {error}") from error


def _each(frame: bytes, decode: Callable[[bytes], list[T]]) -> Iterator[T]:
    try:
        parts = _split(frame)
    except _MALFORMED:
        return
    for part in parts:
        try:
            yield from decode(_encode([part]))
        except _MALFORMED as error:
            _log_drop("malformed", f"a message of {len(bytes(part))} bytes: {error}")


def set_options(socket: zmq.asyncio.Socket, address: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    # Connections to a stopped machine stay open; the heartbeat lets a trainer reach the next server.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)


class Outbox:
    def __init__(self) -> None:
        self._messages: deque[Tagged] = deque()
        self._filled = asyncio.Event()
        self.dropped = 0

    def put(self, message: Tagged) -> None:
        if len(self._messages) >= MAX_QUEUED:
            self._messages.popleft()
            self.dropped += 1
        self._messages.append(message)
        self._filled.set()

    def put_latest(self, message: Tagged) -> None:
        """Replace earlier messages of this type."""
        kind = type(message)
        self._messages = deque(queued for queued in self._messages if not isinstance(queued, kind))
        self.put(message)

    def clear(self) -> None:
        self._messages.clear()

    async def take(self) -> list[Tagged]:
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        taken = list(self._messages)
        self._messages.clear()
        return taken
