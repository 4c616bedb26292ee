"""Messages between the server and a gateway process, over a Unix socket pair.

A frame is its length (4 bytes, big-endian) and a msgpack list of one event-loop iteration's messages.
Messages arrive once and in order, or the channel closes and the process ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tinkerscript.errors import GatewayError, StoreError
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.logs import now_about
from tinkerscript.rollouts.call import Call
from tinkerscript.sampler import Sampler
from tinkerscript.server.claims import LeasedClaims
from tinkerscript.trainer_link.messages import (
    CancelSample,
    Sample,
    Sampled,
    SampleFailed,
    SampleProgress,
    Tagged,
)
from tinkerscript.trainer_link.remote_sampling import SampleService


class Ready(Tagged, frozen=True):
    """The process accepts connections."""


class AskOpen(Tagged, frozen=True):
    """Every `Ask*` gets an `Answer` or an `AskRefused`."""

    ask_id: int
    key: str


class AskBegin(Tagged, frozen=True):
    ask_id: int
    claim: OpenClaim
    num_samples: int
    max_tokens: int
    num_bytes: int = 0


class CallOver(Tagged, frozen=True):
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


class Setup(Tagged, frozen=True):
    config: bytes
    any_host: bool
    """See `asgi.problem_with_site`."""


class Answer(Tagged, frozen=True):
    ask_id: int
    claim: OpenClaim | None = None
    max_tokens: int = 0
    calls: Sequence[Call] = ()


class AskRefused(Tagged, frozen=True):
    """A `GatewayError`, or 503 if the ledger fails."""

    ask_id: int
    status: int
    code: str
    message: str


class ForgetClaim(Tagged, frozen=True):
    episode_uuid: str
    attempt: int


class StopServing(Tagged, frozen=True):
    """Asks the process to finish its running requests and exit."""


ToGateway = Setup | Answer | AskRefused | ForgetClaim | StopServing | Sampled | SampleProgress | SampleFailed

_encode = msgspec.msgpack.Encoder().encode


class Channel(asyncio.Protocol):
    def __init__(
        self, kind: Any, handle: Callable[[Any], None], closed: Callable[[], None] = lambda: None
    ) -> None:
        """`kind` is `FromGateway` or `ToGateway`."""
        self.connected = False
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._handle = handle
        self._closed = closed
        self._buffer = bytearray()
        self._outgoing: list[Tagged] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass.
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
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if self.connected and self._transport is not None:
            frame = _encode(messages)
            self._transport.writelines([len(frame).to_bytes(4), frame])

    def close(self) -> None:
        self._flush()
        if self._transport is not None:
            self._transport.close()


class RemoteClaims(ClaimBook):
    def __init__(self, send: Callable[[Tagged], None]) -> None:
        """The server answers to `answered`."""
        self._send = send
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._begun: dict[tuple[OpenClaim, int, int, int], list[int]] = {}
        """(claim, samples, tokens per sample, bytes) -> ids of running `AskBegin`s."""

    async def open(self, key: str) -> OpenClaim:
        answer = await self._ask(AskOpen(ask_id=next(self._ids), key=key))
        assert answer.claim is not None
        now_about(episode=answer.claim.episode_uuid, attempt=answer.claim.attempt)
        return answer.claim

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> int:
        ask = AskBegin(
            ask_id=next(self._ids),
            claim=claim,
            num_samples=num_samples,
            max_tokens=max_tokens,
            num_bytes=num_bytes,
        )
        try:
            answer = await self._ask(ask)
        except asyncio.CancelledError:
            self._send(CallOver(ask_id=ask.ask_id))
            raise
        self._begun.setdefault((claim, num_samples, answer.max_tokens, num_bytes), []).append(ask.ask_id)
        return answer.max_tokens

    def end(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> None:
        kind = (claim, num_samples, max_tokens, num_bytes)
        self._send(CallOver(ask_id=self._begun[kind].pop()))
        if not self._begun[kind]:
            del self._begun[kind]

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        await self._ask(AskRecord(ask_id=next(self._ids), claim=claim, calls=list(calls)))

    async def calls(self, claim: OpenClaim) -> list[Call]:
        return list((await self._ask(AskCalls(ask_id=next(self._ids), claim=claim))).calls)

    async def _ask(self, ask: Ask) -> Answer:
        self._asked[ask.ask_id] = asyncio.get_running_loop().create_future()
        self._send(ask)
        try:
            return await self._asked[ask.ask_id]
        finally:
            del self._asked[ask.ask_id]

    def answered(self, answer: Answer | AskRefused) -> None:
        asked = self._asked.get(answer.ask_id)
        if asked is None or asked.done():
            return
        if isinstance(answer, Answer):
            asked.set_result(answer)
        else:
            asked.set_exception(GatewayError(answer.status, answer.code, answer.message))


class ClaimService:
    def __init__(
        self,
        number: int,
        claims: LeasedClaims,
        sampler: Sampler,
        *,
        send: Callable[[Tagged], None],
        ready: Callable[[], None],
    ) -> None:
        self._number = number
        self._claims = claims
        self._samples = SampleService(sampler.sample, send)
        self._send = send
        self._ready = ready
        self._begun: dict[int, tuple[AskBegin, int]] = {}
        self._tasks = set[asyncio.Task[None]]()

    def take(self, message: FromGateway) -> None:
        match message:
            case AskRecord() | AskCalls():
                task = asyncio.create_task(self._look_up(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case AskOpen() | AskBegin():
                try:
                    self._send(self._answer(message))
                except GatewayError as error:
                    self._refuse(message, error)
            case CallOver():
                self._end(message.ask_id)
            case Sample():
                self._samples.start(message)
            case CancelSample():
                self._samples.cancel(message.request_id)
            case Ready():
                self._ready()

    async def close(self) -> None:
        """End the process's running calls, and finish recording."""
        for ask_id in list(self._begun):
            self._end(ask_id)
        await self._samples.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _answer(self, ask: AskOpen | AskBegin) -> Answer:
        if isinstance(ask, AskOpen):
            return Answer(ask_id=ask.ask_id, claim=self._claims.opened(ask.key, gateway=self._number))
        granted = self._claims.reserve(ask.claim, ask.num_samples, ask.max_tokens, ask.num_bytes)
        self._begun[ask.ask_id] = (ask, granted)
        return Answer(ask_id=ask.ask_id, max_tokens=granted)

    def _end(self, ask_id: int) -> None:
        if begun := self._begun.pop(ask_id, None):
            ask, granted = begun
            self._claims.end(ask.claim, ask.num_samples, granted, ask.num_bytes)

    async def _look_up(self, ask: AskRecord | AskCalls) -> None:
        try:
            if isinstance(ask, AskRecord):
                await self._claims.record(ask.claim, ask.calls)
                answer = Answer(ask_id=ask.ask_id)
            else:
                answer = Answer(ask_id=ask.ask_id, calls=await self._claims.calls(ask.claim))
        except GatewayError as error:
            self._refuse(ask, error)
        except StoreError as error:
            self._refuse(ask, GatewayError(503, "store_unavailable", str(error)))
        else:
            self._send(answer)

    def _refuse(self, ask: Ask, error: GatewayError) -> None:
        self._send(AskRefused(ask_id=ask.ask_id, status=error.status, code=error.code, message=error.message))
