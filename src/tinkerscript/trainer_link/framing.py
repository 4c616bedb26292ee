"""What both ends of the link share: frames, socket options, intervals, and the queue of outgoing messages.

A frame is a msgpack list of messages; messages queued in one tick of the event loop share a frame. Invariant:
a message that cannot be decoded is dropped and takes no other along, and no queue grows without bound.
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

MAX_FRAME_BYTES = 256 * 2**20
"""A peer that sends a larger frame is disconnected."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 2**20
"""Of one message: the rest is for what is around it. A larger one is never sent."""

FULL_FRAME_BYTES = 4 * 2**20
"""A frame is closed once it holds this much."""

MAX_QUEUED = 100_000
"""Limit of the send queue, in messages. Beyond it the oldest are dropped; whatever matters is repeated."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Intervals of the link, in seconds."""

    heartbeat_s: float = 1.0
    """Time between two `Hello` messages."""

    silence_s: float = 5.0
    """Time without a message after which the trainer counts as disconnected."""

    grace_s: float = 10.0
    """How long a model call waits for a trainer to connect."""

    resend_s: float = 5.0
    """Time after which an unconfirmed message is sent again."""


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
    """Pack messages into frames, in order.

    `drop(reason, detail, message)` is called for a message that cannot be written, or is too large: its frame
    would end the connection, and with it every other message, as often as it is repeated.
    """
    parts, size = list[msgspec.Raw](), 0
    for message in messages:
        try:
            encoded = _encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            drop("unencodable", f"{type(message).__name__}: {error}", message)
            continue
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
    """The messages of a trainer's frame. Raises LinkError if none can be read."""
    return _read(frame, _decode_to_server)


def read_to_trainer(frame: bytes) -> list[ToTrainer]:
    """The messages of a server's frame. Raises LinkError if none can be read."""
    return _read(frame, _decode_to_trainer)


def _read(frame: bytes, decode: Callable[[bytes], list[T]]) -> list[T]:
    try:
        return decode(frame)
    except _MALFORMED as error:
        if found := list(_each(frame, decode)):
            return found
        raise LinkError(f"malformed frame of {len(frame)} bytes: {error}") from error


def _each(frame: bytes, decode: Callable[[bytes], list[T]]) -> Iterator[T]:
    """The messages of a frame that can be read: those that cannot are dropped, and take no others along."""
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
    """Limits and reconnection, the same at both ends."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    # A stopped machine keeps its connections: without these a trainer would not reach the next server.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5000)


class Outbox:
    """The bounded queue of outgoing messages."""

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
        """Put a message in place of those of its kind that are still queued."""
        kind = type(message)
        self._messages = deque(queued for queued in self._messages if not isinstance(queued, kind))
        self.put(message)

    def clear(self) -> None:
        """Drop what was queued for a peer that is gone."""
        self._messages.clear()

    async def take(self) -> list[Tagged]:
        """Wait for messages and return all that are queued."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        taken = list(self._messages)
        self._messages.clear()
        return taken
