"""`NamedModel` answers the calls of one model: the policy, or a role of the run.

A reply is sent only after its calls are recorded, and repeating its request repeats the reply.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tinkerscript.asgi import CLIENT_CLOSED_REQUEST, Caller
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import continued
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.conversation.session import (
    LONG_HISTORY,
    ConversationRenderer,
    Session,
    in_thread_if,
)
from tinkerscript.gateway.conversation.tree import Turn
from tinkerscript.gateway.dialects import DIALECTS
from tinkerscript.gateway.dialects.agent_mode import AGENT_FIELDS, AGENT_PREFIX
from tinkerscript.gateway.dialects.dialect import Completion, Dialect, ModelCall, ReplyHeader, TokenCounter
from tinkerscript.gateway.dialects.validation import ONLY_TEXT
from tinkerscript.gateway.idempotency import Attempt, IdempotencyCache, RequestFingerprint, fingerprint_of
from tinkerscript.gateway.streamed_reply import StreamedReply
from tinkerscript.limits import CALLS_AT_ONCE, FAILED_CALLS
from tinkerscript.rollouts.call import calls_of, utf8_size

ENCODER = msgspec.json.Encoder()

_Handler = Callable[[Any, Caller, bytes], Awaitable[None]]


# `uuid4` would cost a system call per id.
_IDS = random.Random()

UNCOUNTED_STATUSES = frozenset({409, 429, 503, 504})  # These are not the call's fault.
LONG_BODY = 2**18  # Parsing takes 0.5 ms or more, so a thread does it.

# Decoding must not delay other requests.
_DECODING = ThreadPoolExecutor(1, "images")


@dataclass(slots=True)
class ClaimState:
    claim: OpenClaim
    session: Session
    cache: IdempotencyCache
    in_flight: int = 0
    failed: int = 0  # Refused, or failed in the engine.
    # One request's images take up to a minute, and others wait behind each claim's next.
    decoding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextmanager
    def answering(self) -> Generator[None]:
        """Raises GatewayError 403 after too many failed calls, and 429 for too many at once."""
        if self.failed >= FAILED_CALLS.limit:
            raise FAILED_CALLS.refusal(self.failed + 1)
        CALLS_AT_ONCE.check(self.in_flight + 1)
        self.in_flight += 1
        try:
            yield
        except GatewayError as error:
            self.failed += error.status not in UNCOUNTED_STATUSES
            raise
        except Exception:
            self.failed += 1
            raise
        finally:
            self.in_flight -= 1


class PreparedRequest(msgspec.Struct, frozen=True):
    claim: OpenClaim
    call: ModelCall
    session: Session
    turns: list[Turn]
    header: ReplyHeader
    attempt: Attempt

    def recorded_fields(self, turn: Turn) -> dict[str, Any]:
        fingerprint = self.attempt.fingerprint
        return {
            "parent_id": turn.parent.call_id if turn.parent else None,
            "matched_by": turn.matched_by,
            "created": self.header.created,
            "idempotency_key": fingerprint.key,
            "request_digest": fingerprint.digest if fingerprint.key else "",
            "ignored": self.call.ignored,
            "side": self.call.side,
            "images": turn.images,
        }

    def recorded_bytes(self, number: int = 0) -> int:
        turn, texts = self.turns[number], self.turns[number].texts
        images = sum(len(image.data) for image in turn.images)
        return self.call.n * (len(turn.new_prompt) + images) + sum(map(utf8_size, texts))


class NamedModel(ABC):
    def __init__(
        self,
        name: str,
        claims: ClaimBook,
        renderer: ConversationRenderer,
        *,
        role: str = "",
        no_images: str | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.max_context: int | None = None  # Tokens of prompt and reply together.
        self._claims = claims
        self._prompts = renderer
        self._states: dict[tuple[str, int], ClaimState] = {}
        self._handlers: dict[str, tuple[_Handler, Dialect[Any]]] = {}
        self.dialects = list(_dialects(renderer, no_images))
        for dialect in self.dialects:
            self._handlers[route_of(dialect)] = (self._answer, dialect)
            if isinstance(dialect, TokenCounter):
                self._handlers[route_of(dialect, counts=True)] = (self._count, dialect)

    async def handle(self, path: str, caller: Caller, body: bytes) -> None:
        handler, dialect = self._handlers[path]
        try:
            await handler(dialect, caller, body)
        except GatewayError as error:
            await caller.refuse(error.status, ENCODER.encode(dialect.error(error)))

    def forget(self, episode_uuid: str, attempt: int) -> None:
        self._states.pop((episode_uuid, attempt), None)

    @abstractmethod
    def _check(self, call: ModelCall) -> None: ...

    @abstractmethod
    async def _completed(
        self, prepared: PreparedRequest, caller: Caller, live: StreamedReply | None
    ) -> Completion | None: ...

    @abstractmethod
    def _streamed(self, dialect: Dialect[Any], call: ModelCall, header: ReplyHeader) -> StreamedReply: ...

    @abstractmethod
    async def _recorded(self, state: ClaimState, call: ModelCall, call_id: str) -> Completion | None: ...

    async def _reply(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        completion = await self._completed(prepared, caller, None)
        if completion is None:
            await caller.reply(b"", status=CLIENT_CLOSED_REQUEST)
            return
        await asyncio.sleep(0)  # See `_answer`.
        if not await caller.is_disconnected():
            await caller.reply(ENCODER.encode(dialect.reply(prepared.call, completion)))
            prepared.attempt.delivered = True

    async def _stream(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        live = self._streamed(dialect, prepared.call, prepared.header)
        try:
            completion = await self._completed(prepared, caller, live)
            if completion is None:
                return
            rest = live.finish(completion)
            disconnected = await caller.is_disconnected()
            await caller.send_events(rest if caller.streaming else live.start() + rest, last=True)
            prepared.attempt.delivered = not disconnected
        except GatewayError as error:
            if not caller.streaming:
                raise
            await caller.send_events(live.failure(error), last=True)

    async def _answer(self, dialect: Dialect[Any], caller: Caller, body: bytes) -> None:
        # Each step yields to the event loop, so that simultaneous requests run the same step in turn, with
        # its code in the processor's caches. That saves a fifth of the time.
        claim = await self._claims.open(caller.key)
        state = await self._state(claim)
        with state.answering():
            if dialect.no_images is None and (b"image_url" in body or b"\\u" in body):
                loop = asyncio.get_running_loop()
                async with state.decoding:
                    fingerprint, call = await loop.run_in_executor(_DECODING, _read, dialect, caller, body)
            else:
                fingerprint, call = await in_thread_if(len(body) >= LONG_BODY, _read, dialect, caller, body)
            while attempt := state.cache.in_flight(fingerprint):
                if await caller.until_disconnect(attempt.done.wait()) is None:
                    return
                state = await self._state(await self._claims.open(caller.key))
            await self._repeat_or_reply(dialect, caller, state, fingerprint, call)

    async def _count(self, dialect: TokenCounter[Any], caller: Caller, body: bytes) -> None:
        state = await self._state(await self._claims.open(caller.key))
        with state.answering():
            parsed = await in_thread_if(len(body) >= LONG_BODY, dialect.read, dialect.parse_count, body)
            call = await self._with_history(state, parsed)
            tokens = await state.session.prompt_tokens(call.messages, call.tools)
        await caller.reply(ENCODER.encode(dialect.count_reply(tokens)))

    async def _repeat_or_reply(
        self,
        dialect: Dialect[Any],
        caller: Caller,
        state: ClaimState,
        fingerprint: RequestFingerprint,
        call: ModelCall,
    ) -> None:
        call = await self._with_history(state, call)
        with state.cache.attempt(fingerprint) as attempt:
            if original := state.cache.take(fingerprint):
                completion = await self._recorded(state, call, original)
                if completion:
                    attempt.call_id = original
                    await self._repeat(dialect, call, completion, caller, attempt)
                    return
            await asyncio.sleep(0)  # See `_answer`.
            prepared = await self._prepare(state, call, attempt)
            try:
                await asyncio.sleep(0)
                await (self._stream if call.stream else self._reply)(dialect, prepared, caller)
            finally:
                for turn in prepared.turns:
                    state.session.release(turn)

    async def _with_history(self, state: ClaimState, call: ModelCall) -> ModelCall:
        self._check(call)
        if call.previous is None:
            return call
        if not state.claim.continues:
            kept = self._claims.kept(state.claim, call.previous)
            is_long = sum(each.size for each in kept) >= LONG_HISTORY
            state.session = await in_thread_if(is_long, Session.restore, self._prompts, kept)
        history = state.session.messages_of(call.previous)
        return msgspec.structs.replace(call, messages=continued(history, call.messages))

    async def _prepare(self, state: ClaimState, call: ModelCall, attempt: Attempt) -> PreparedRequest:
        session = state.session
        turns: list[Turn] = []
        try:
            for prompt in call.prompts:
                turns.append(await session.plan_ids(prompt))
            if not call.prompts:
                turns.append(await session.plan_async(call.messages, call.tools, call.files))
        except BaseException:
            for turn in turns:
                session.release(turn)
            raise
        header = ReplyHeader(
            call_id=f"{_IDS.getrandbits(128):032x}",
            created=int(time.time()),
            model=self.name,
            prompt=turns[0].prompt,
        )
        return PreparedRequest(state.claim, call, session, turns, header, attempt)

    async def _repeat(
        self, dialect: Dialect[Any], call: ModelCall, completion: Completion, caller: Caller, attempt: Attempt
    ) -> None:
        disconnected = await caller.is_disconnected()
        if call.stream:
            whole = self._streamed(dialect, call, completion)
            await caller.send_events(whole.start() + whole.finish(completion), last=True)
        else:
            await caller.reply(ENCODER.encode(dialect.reply(call, completion)))
        attempt.delivered = not disconnected

    async def _state(self, claim: OpenClaim) -> ClaimState:
        if not claim.continues:
            return ClaimState(claim, Session(self._prompts), IdempotencyCache())
        key = (claim.episode_uuid, claim.attempt)
        if key not in self._states:
            calls = calls_of(await self._claims.calls(claim), self.role)
            if key not in self._states:
                session = Session.restore(self._prompts, calls)
                self._states[key] = ClaimState(claim, session, IdempotencyCache(calls))
        return self._states[key]


def _read(dialect: Dialect[Any], caller: Caller, body: bytes) -> tuple[RequestFingerprint, ModelCall]:
    return fingerprint_of(caller.headers, dialect.path, body), dialect.read(dialect.parse, body)


def _dialects(renderer: ConversationRenderer, no_images: str | None) -> Iterator[Dialect[Any]]:
    why = ONLY_TEXT if renderer.images is None else no_images
    for dialect in DIALECTS:
        yield dialect(renderer.tokenizer, no_images=why)
        if dialect.path in AGENT_FIELDS:
            yield dialect(renderer.tokenizer, agent_mode=True, no_images=why)


def route_of(dialect: Dialect[Any], *, counts: bool = False) -> str:
    path = dialect.count_path if counts and isinstance(dialect, TokenCounter) else dialect.path
    return (AGENT_PREFIX if dialect.agent_mode else "") + path
