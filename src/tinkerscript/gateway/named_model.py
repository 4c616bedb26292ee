"""`NamedModel`: what answers the calls of one model: the policy, or a role of the run.

Owns the state of open claims. Invariant: a reply is sent only after the calls behind it are recorded; a
request that repeats a recorded one gets its reply.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tinkerscript.asgi import Caller
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import continued
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.conversation.session import ConversationRenderer, Session, unblocked
from tinkerscript.gateway.conversation.tree import Turn
from tinkerscript.gateway.dialects import DIALECTS
from tinkerscript.gateway.dialects.agent_mode import AGENT_FIELDS, AGENT_PREFIX
from tinkerscript.gateway.dialects.dialect import Completion, Dialect, ModelCall, ReplyHeader, TokenCounter
from tinkerscript.gateway.idempotency import Attempt, IdempotencyCache, RequestFingerprint, fingerprint_of
from tinkerscript.rollouts.call import calls_of

ENCODER = msgspec.json.Encoder()

_Handler = Callable[[Any, Caller, bytes], Awaitable[None]]
"""Of a dialect, a caller, and the request's body."""


PLACES = 8
"""Of short requests that go on in one turn of the loop. The fewer, the more it costs to commit each."""

PLACE_BYTES = 2**12
"""What has more than this to read or to write takes several places."""

_IDS = random.Random()
"""Makes the ids of calls. The system gives one seed: asking it for every id would be a system call each."""

LONG_BODY = 2**18
"""Bytes of a request from which on a thread reads it, which takes half a millisecond."""


class Turns:
    """Lets some of many requests go on in each turn of the event loop, in order.

    A hundred that arrive together, or whose samples do, would otherwise keep everything else waiting for as
    long as all of them take.
    """

    def __init__(self, at_once: int = PLACES) -> None:
        self._at_once = at_once
        self._free = at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where the places of a turn are counted; None while all of them are free."""

        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        """With the places that each takes."""

    async def next(self, size: int = 0) -> None:
        """Return in this turn of the loop, if there is room in it, or in a later one.

        `size`: about how many bytes the request reads or writes before it waits again.
        """
        places = min(1 + size // PLACE_BYTES, self._at_once)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._begin)
        if self._free >= places and not self._waiting:
            self._free -= places
            return
        turn = self._loop.create_future()
        self._waiting.append((turn, places))
        await turn

    def _begin(self) -> None:
        self._free = self._at_once
        while self._waiting and self._free >= self._waiting[0][1]:
            turn, places = self._waiting.popleft()
            if not turn.done():  # Its request was not cancelled.
                turn.set_result(None)
                self._free -= places
        if self._free == self._at_once or self._loop is None:
            self._loop = None
        else:
            self._loop.call_soon(self._begin)


async def in_step() -> None:
    """Let the other requests of this turn come as far as this one, which goes on in the next turn.

    So they take each step one right after the other, and for all but the first of them its code is in the
    processor's caches: a fifth of a request's time.
    """
    await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class ClaimState:
    """What is kept in memory of an open claim's calls to one model."""

    claim: OpenClaim
    session: Session
    cache: IdempotencyCache


class PreparedRequest(msgspec.Struct, frozen=True):
    """A request whose prompts are made."""

    claim: OpenClaim
    call: ModelCall
    session: Session
    turns: list[Turn]
    """One per prompt; messages make one prompt."""

    header: ReplyHeader
    attempt: Attempt

    @property
    def size(self) -> int:
        """Bytes of its prompts that are recorded."""
        return sum(len(turn.new_prompt) for turn in self.turns)


class NamedModel(ABC):
    """The calls of one model in every dialect, authenticated and recorded by a `ClaimBook`."""

    def __init__(
        self, name: str, claims: ClaimBook, renderer: ConversationRenderer, *, role: str = ""
    ) -> None:
        """`name`: what replies call the model; `role`: of its calls, empty for the policy."""
        self.name = name
        self.role = role
        self.max_context: int | None = None
        """Longest prompt and reply together, in tokens; None: unknown."""

        self.turns = Turns()
        self._claims = claims
        self._prompts = renderer
        self._states: dict[tuple[str, int], ClaimState] = {}
        self._handlers: dict[str, tuple[_Handler, Dialect[Any]]] = {}
        for dialect in dialects(renderer):
            self._handlers[route_of(dialect)] = (self._answer, dialect)
            if isinstance(dialect, TokenCounter):
                self._handlers[route_of(dialect, counts=True)] = (self._count, dialect)

    async def handle(self, path: str, caller: Caller, body: bytes) -> None:
        """Answer the request to the route `path`; an error becomes a reply of its dialect."""
        handler, dialect = self._handlers[path]
        try:
            await handler(dialect, caller, body)
        except GatewayError as error:
            await caller.refuse(error.status, ENCODER.encode(dialect.error(error)))

    def forget(self, episode_uuid: str, attempt: int) -> None:
        """Drop the state of a claim that ended or whose lease expired."""
        self._states.pop((episode_uuid, attempt), None)

    @abstractmethod
    def _check(self, call: ModelCall) -> None:
        """Raises GatewayError for a call that this model cannot answer."""

    @abstractmethod
    async def _reply(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        """Make and record the completion, and send the whole reply."""

    @abstractmethod
    async def _stream(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        """Send events meanwhile, and the last ones once the calls are recorded."""

    @abstractmethod
    async def _recorded(self, state: ClaimState, call: ModelCall, call_id: str) -> Completion | None:
        """The completion of `call` that was recorded as `call_id`; None if it cannot be made again."""

    @abstractmethod
    def _whole_stream(self, dialect: Dialect[Any], call: ModelCall, completion: Completion) -> bytes:
        """All events of a recorded completion."""

    async def _answer(self, dialect: Dialect[Any], caller: Caller, body: bytes) -> None:
        """Sample, or repeat what is recorded, once no request with the same key is in flight."""
        claim = await self._claims.open(caller.key)
        await self.turns.next(len(body))  # Not before: a gateway process has its answers to `open` together.
        fingerprint, call = await unblocked(len(body) >= LONG_BODY, _read, dialect, caller, body)
        state = await self._state(claim)
        while attempt := state.cache.in_flight(fingerprint):
            if await caller.until_disconnect(attempt.done.wait()) is None:
                return
            state = await self._state(await self._claims.open(caller.key))
        await self._repeat_or_reply(dialect, caller, state, fingerprint, call)

    async def _count(self, dialect: TokenCounter[Any], caller: Caller, body: bytes) -> None:
        """Count the tokens of a prompt."""
        session = (await self._state(await self._claims.open(caller.key))).session
        await self.turns.next(len(body))
        parsed = await unblocked(len(body) >= LONG_BODY, dialect.read, dialect.parse_count, body)
        call = self._with_history(session, parsed)
        tokens = await session.prompt_tokens(call.messages, call.tools)
        await caller.reply(ENCODER.encode(dialect.count_reply(tokens)))

    async def _repeat_or_reply(
        self,
        dialect: Dialect[Any],
        caller: Caller,
        state: ClaimState,
        fingerprint: RequestFingerprint,
        call: ModelCall,
    ) -> None:
        call = self._with_history(state.session, call)
        with state.cache.attempt(fingerprint) as attempt:
            if original := state.cache.take(fingerprint):
                completion = await self._recorded(state, call, original)
                if completion:
                    attempt.call_id = original
                    await self._repeat(dialect, call, completion, caller, attempt)
                    return
            await in_step()
            prepared = await self._prepare(state, call, attempt)
            try:
                await in_step()
                await (self._stream if call.stream else self._reply)(dialect, prepared, caller)
            finally:
                for turn in prepared.turns:
                    state.session.release(turn)

    def _with_history(self, session: Session, call: ModelCall) -> ModelCall:
        """`call` with the messages it continues. Raises GatewayError for one that cannot be answered."""
        self._check(call)
        if call.previous is None:
            return call
        history = session.messages_of(call.previous)
        return msgspec.structs.replace(call, messages=continued(history, call.messages))

    async def _prepare(self, state: ClaimState, call: ModelCall, attempt: Attempt) -> PreparedRequest:
        session = state.session
        turns: list[Turn] = []
        try:
            for prompt in call.prompts:
                turns.append(await session.plan_ids(prompt))
            if not call.prompts:
                turns.append(await session.plan_unblocked(call.messages, call.tools))
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
        """Send a recorded completion."""
        disconnected = await caller.is_disconnected()
        if call.stream:
            await caller.send_events(self._whole_stream(dialect, call, completion), last=True)
        else:
            await caller.reply(ENCODER.encode(dialect.reply(call, completion)))
        attempt.delivered = not disconnected

    async def _state(self, claim: OpenClaim) -> ClaimState:
        """The state of a claim, restored from its recorded calls if need be."""
        if not claim.continues:
            return ClaimState(claim, Session(self._prompts), IdempotencyCache())
        key = (claim.episode_uuid, claim.attempt)
        if key not in self._states:
            # Raises if the claim is lost meanwhile, so that it leaves no state behind.
            calls = calls_of(await self._claims.calls(claim), self.role)
            if key not in self._states:  # Another request may have restored it.
                session = Session.restore(self._prompts, calls)
                self._states[key] = ClaimState(claim, session, IdempotencyCache(calls))
        return self._states[key]


def _read(dialect: Dialect[Any], caller: Caller, body: bytes) -> tuple[RequestFingerprint, ModelCall]:
    """What a request asks for. May run in a thread. Raises GatewayError 400."""
    return fingerprint_of(caller.headers, dialect.path, body), dialect.read(dialect.parse, body)


def dialects(renderer: ConversationRenderer) -> Iterator[Dialect[Any]]:
    """Every wire format for one model's tokenizer, and those that have one in agent mode."""
    for dialect in DIALECTS:
        yield dialect(renderer.tokenizer)
        if dialect.path in AGENT_FIELDS:
            yield dialect(renderer.tokenizer, agent_mode=True)


def route_of(dialect: Dialect[Any], *, counts: bool = False) -> str:
    """The whole path of a dialect's requests; with `counts`, of those that count tokens."""
    path = dialect.count_path if counts and isinstance(dialect, TokenCounter) else dialect.path
    return (AGENT_PREFIX if dialect.agent_mode else "") + path
