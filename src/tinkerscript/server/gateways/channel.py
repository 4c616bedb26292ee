"""The channel between the server and one of its gateway processes: messages over a pair of Unix sockets.

A frame is its length (4 bytes, big-endian) and a msgpack list of messages, those of one tick of the event
loop. Invariants: messages arrive once and in order, or the channel is closed and with it the process; what
waits in it is bounded by the requests that the process answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.rollouts.call import Call
from tinkerscript.trainer_link.messages import (
    CancelSample,
    Sample,
    Sampled,
    SampleFailed,
    SampleProgress,
    Tagged,
)

# From a gateway process


class Ready(Tagged, frozen=True):
    """Connections are welcome."""


class AskOpen(Tagged, frozen=True):
    """Answered like every `Ask*`: by an `Answer` or an `AskRefused`."""

    ask_id: int
    key: str


class AskBegin(Tagged, frozen=True):
    ask_id: int
    claim: OpenClaim
    num_samples: int
    max_tokens: int


class CallOver(Tagged, frozen=True):
    """What an `AskBegin` was allowed is over, or was never begun."""

    ask_id: int


class AskRecord(Tagged, frozen=True):
    ask_id: int
    claim: OpenClaim
    calls: list[Call]


class AskCalls(Tagged, frozen=True):
    ask_id: int
    claim: OpenClaim


Ask = AskOpen | AskBegin | AskRecord | AskCalls

FromGateway = Ready | Ask | CallOver | Sample | CancelSample

# To a gateway process


class Setup(Tagged, frozen=True):
    """The first message."""

    config: bytes
    """JSON of the `RunConfig`."""


class Answer(Tagged, frozen=True):
    ask_id: int
    claim: OpenClaim | None = None
    """To `AskOpen`."""

    max_tokens: int = 0
    """To `AskBegin`."""

    calls: Sequence[Call] = ()
    """To `AskCalls`."""


class AskRefused(Tagged, frozen=True):
    """A `GatewayError`, or an error of the server's own (500)."""

    ask_id: int
    status: int
    code: str
    message: str


class ForgetClaim(Tagged, frozen=True):
    """The claim is over."""

    episode_uuid: str
    attempt: int


class StopServing(Tagged, frozen=True):
    """Answer what is there, and end."""


ToGateway = Setup | Answer | AskRefused | ForgetClaim | StopServing | Sampled | SampleProgress | SampleFailed

_encode = msgspec.msgpack.Encoder().encode


class Channel(asyncio.Protocol):
    """One end. `connected` says whether it is open."""

    def __init__(
        self, kind: Any, handle: Callable[[Any], None], closed: Callable[[], None] = lambda: None
    ) -> None:
        """`kind`: `FromGateway` or `ToGateway`, what `handle` gets. `closed` is called at the end."""
        self.connected = False
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._handle = handle
        self._closed = closed
        self._buffer = bytearray()
        self._outgoing: list[Tagged] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass.
        self.connected = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.connected = False
        self._closed()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + 4:
            end = start + 4 + int.from_bytes(self._buffer[start : start + 4])
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                messages = self._decode(view[start + 4 : end])
            start = end
            for message in messages:
                self._handle(message)
        del self._buffer[:start]

    def send(self, message: Tagged) -> None:
        """Send with the other messages of this tick; nothing on a channel that is closed."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if self.connected and self._transport is not None:
            frame = _encode(messages)
            self._transport.writelines([len(frame).to_bytes(4), frame])

    def close(self) -> None:
        """Send what waits, and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
