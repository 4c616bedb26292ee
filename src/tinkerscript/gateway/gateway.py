"""The model endpoint: a key opens a claim, the claim's session makes the prompt, every call is recorded.

Owns the HTTP routes and the state of open claims. Invariant: a reply is sent only after the calls behind it
are recorded, and a request that failed or was abandoned records nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Response

from tinkerscript.asgi import CLIENT_CLOSED_REQUEST, Caller, CallerDisconnectedError, Deferred, Responder
from tinkerscript.config import RunConfig, SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import continued
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.conversation.session import Session
from tinkerscript.gateway.conversation.tree import Turn
from tinkerscript.gateway.dialects import DIALECTS
from tinkerscript.gateway.dialects.agent_mode import AGENT_FIELDS, AGENT_PREFIX
from tinkerscript.gateway.dialects.dialect import Completion, Dialect, ModelCall, ReplyHeader, TokenCounter
from tinkerscript.gateway.dialects.openai import OpenAIDialect
from tinkerscript.gateway.idempotency import Attempt, IdempotencyCache, RequestFingerprint, fingerprint_of
from tinkerscript.gateway.recording import (
    GatewayStatistics,
    PreparedRequest,
    Recorder,
    recorded_completion,
    sample_all,
)
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.gateway.streamed_reply import StreamedReply
from tinkerscript.model_folder import model_folder, model_name
from tinkerscript.tracing import call_span

POLICY = "policy"
"""A name by which every program can request the model being trained."""

MODELS_PATH = "/v1/models"

_ENCODER = msgspec.json.Encoder()

_Handler = Callable[[Any, Caller, bytes], Awaitable[None]]
"""Of a dialect, a caller, and the request's body."""


class _Turns:
    """Lets a few of many requests go on in each turn of the event loop, in order.

    A hundred that arrive together, or whose samples do, would otherwise keep everything else waiting for as
    long as all of them take.
    """

    def __init__(self, at_once: int = 4) -> None:
        self._at_once = at_once
        self._free = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def next(self) -> None:
        """Return in this turn of the loop, if there is room in it, or in a later one."""
        if self._free == self._at_once:
            asyncio.get_running_loop().call_soon(self._begin)
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _begin(self) -> None:
        self._free = self._at_once
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            if not turn.done():  # Its request was not cancelled.
                turn.set_result(None)
                self._free -= 1
        if self._free < self._at_once:
            asyncio.get_running_loop().call_soon(self._begin)


@dataclass(frozen=True, slots=True)
class _ClaimState:
    """What is kept in memory of an open claim."""

    claim: OpenClaim
    session: Session
    cache: IdempotencyCache


class Gateway:
    """Routes for models over a `Sampler`, authenticated and recorded by a `ClaimBook`."""

    router: APIRouter
    """Routes under `/v1`, to be included in the server's application."""

    routes: dict[str, Responder]
    """Whole path -> responder to a POST, for `ModelRoutes`."""

    def __init__(
        self,
        *,
        claims: ClaimBook,
        sampler: Sampler,
        renderer: ChatRenderer,
        model_names: list[str],
        any_name: bool,
        sampling: SamplingConfig,
    ) -> None:
        """`model_names`: those that requests may use, or with `any_name` the ones to show. Replies carry the
        first one.
        """
        self._claims = claims
        self._sampler = sampler
        self._renderer = renderer
        self._model_names = model_names
        self._any_name = any_name
        self._sampling = sampling
        self._states: dict[tuple[str, int], _ClaimState] = {}
        self._turns = _Turns()
        self._recorder = Recorder(claims, renderer, sampling)
        self._started = int(time.time())
        self.routes = {}
        self.router = APIRouter(tags=["model"])
        for dialect in DIALECTS:
            self._add_dialect(dialect(renderer.tokenizer))
            if dialect.path in AGENT_FIELDS:
                self._add_dialect(dialect(renderer.tokenizer, agent_mode=True))
        for path in (MODELS_PATH, AGENT_PREFIX + MODELS_PATH):
            self.router.add_api_route(path, self._models, methods=["GET"], response_model=None)

    def forget(self, episode_uuid: str, attempt: int) -> None:
        """Drop the state of a claim that ended or whose lease expired."""
        self._states.pop((episode_uuid, attempt), None)

    def statistics(self) -> GatewayStatistics:
        """A snapshot of the counters."""
        return self._recorder.statistics()

    def for_others(self, claims: ClaimBook) -> Gateway:
        """A gateway for callers whose calls are not the run's: the same model, keys of `claims`.

        The seeds of the run's own requests stay what they are, whatever these callers do.
        """
        return Gateway(
            claims=claims,
            sampler=_RandomSeeds(self._sampler),
            renderer=self._renderer,
            model_names=self._model_names,
            any_name=self._any_name,
            sampling=self._sampling,
        )

    def _add_dialect(self, dialect: Dialect[Any]) -> None:
        prefix, mode = (AGENT_PREFIX, "In agent mode: ") if dialect.agent_mode else ("", "")
        name = type(dialect).__name__ + ("ForAgents" if dialect.agent_mode else "")
        answer: Responder = partial(self._serve, self._answer, dialect)
        self._add_route(prefix + dialect.path, answer, name, mode + (dialect.__doc__ or ""))
        if isinstance(dialect, TokenCounter):
            description = f"{mode}Count the prompt tokens of a `{dialect.path}` request. Nothing is sampled."
            count: Responder = partial(self._serve, self._count, dialect)
            self._add_route(prefix + dialect.count_path, count, f"{name}Count", description)

    def _add_route(self, path: str, responder: Responder, name: str, description: str) -> None:
        async def endpoint() -> Response:
            return Deferred(responder)

        self.routes[path] = responder
        self.router.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, name=name, description=description
        )

    async def _serve(self, handle: _Handler, dialect: Dialect[Any], caller: Caller) -> None:
        """Read and handle one request; an error becomes a reply of the dialect."""
        try:
            body = await caller.body()
            await self._turns.next()
            await handle(dialect, caller, body)
        except GatewayError as error:
            await caller.refuse(error.status, _ENCODER.encode(dialect.error(error)))
        except CallerDisconnectedError:
            return

    async def _answer(self, dialect: Dialect[Any], caller: Caller, body: bytes) -> None:
        """Sample, or repeat what is recorded, once no request with the same key is in flight."""
        fingerprint = fingerprint_of(caller.headers, dialect.path, body)
        state = await self._state(await self._claims.open(caller.key))
        while attempt := state.cache.in_flight(fingerprint):
            if await caller.until_disconnect(attempt.done.wait()) is None:
                return
            state = await self._state(await self._claims.open(caller.key))
        await self._repeat_or_sample(dialect, caller, state, fingerprint, body)

    async def _count(self, dialect: TokenCounter[Any], caller: Caller, body: bytes) -> None:
        """Count the tokens of a prompt."""
        session = (await self._state(await self._claims.open(caller.key))).session
        call = self._with_history(session, dialect.read(dialect.parse_count, body))
        tokens = await session.prompt_tokens(call.messages, call.tools)
        await caller.reply(_ENCODER.encode(dialect.count_reply(tokens)))

    async def _repeat_or_sample(
        self,
        dialect: Dialect[Any],
        caller: Caller,
        state: _ClaimState,
        fingerprint: RequestFingerprint,
        body: bytes,
    ) -> None:
        call = self._with_history(state.session, dialect.read(dialect.parse, body))
        with state.cache.attempt(fingerprint) as attempt:
            if original := state.cache.take(fingerprint):
                calls = await self._claims.calls(state.claim)
                completion = recorded_completion(call, original, calls, state.session, self._model_names[0])
                if completion:
                    attempt.call_id = original
                    await self._repeat(dialect, call, completion, caller, attempt)
                    return
            prepared = await self._prepare(state, call, attempt)
            try:
                await (self._stream if call.stream else self._sample)(dialect, prepared, caller)
            finally:
                for turn in prepared.turns:
                    state.session.release(turn)

    def _with_history(self, session: Session, call: ModelCall) -> ModelCall:
        """`call` with the messages it continues. Raises GatewayError for an unknown model or response."""
        if not (self._any_name or call.side or call.model in self._model_names):
            known = " or ".join(repr(name) for name in self._model_names)
            message = (
                f"the model {call.model!r} does not exist here; use {known} (interchange_server.model_names)"
            )
            raise GatewayError(404, "model_not_found", message, param="model")
        self._check_template_kwargs(call.template_kwargs)
        if call.previous is None:
            return call
        history = session.messages_of(call.previous)
        return msgspec.structs.replace(call, messages=continued(history, call.messages))

    def _check_template_kwargs(self, wanted: dict[str, Any]) -> None:
        """Raises GatewayError 400 for arguments of the template that are not those of the run."""
        rendered = self._renderer.template_kwargs
        other = {name: value for name, value in wanted.items() if (name, value) not in rendered.items()}
        if other:
            message = (
                f"chat_template_kwargs={other} are not those of this model's prompts, {rendered}; set "
                "engine.chat_template_kwargs in the run's config, which hold for all of its episodes"
            )
            raise GatewayError(400, "unsupported_parameter", message, param="chat_template_kwargs")

    async def _prepare(self, state: _ClaimState, call: ModelCall, attempt: Attempt) -> PreparedRequest:
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
            call_id=uuid4().hex, created=int(time.time()), model=self._model_names[0], prompt=turns[0].prompt
        )
        return PreparedRequest(state.claim, call, session, turns, header, attempt)

    async def _sample(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        """Sample, record, and send the whole reply."""
        requests = list[SampleRequest]()
        try:
            await self._begin(prepared, requests)
            results = await caller.until_disconnect(self._sampled(prepared, requests))
            if results is None:
                await caller.reply(b"", status=CLIENT_CLOSED_REQUEST)
                return
            await self._turns.next()
            completion = await self._recorder.record(prepared, results)
        finally:
            self._end(prepared, requests)
        if not await caller.is_disconnected():
            await caller.reply(_ENCODER.encode(dialect.reply(prepared.call, completion)))
            prepared.attempt.delivered = True

    async def _stream(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        """Send events while sampling, and the last ones once the calls are recorded."""
        streamed = self._streamed(dialect, prepared.call, prepared.header)
        requests = list[SampleRequest]()
        try:
            try:
                await self._begin(prepared, requests)
                results = await streamed.follow(partial(self._sampled, prepared, requests), caller)
                if results is None:
                    return
                await self._turns.next()
                completion = await self._recorder.record(prepared, results)
            finally:
                self._end(prepared, requests)
            rest = streamed.finish(completion)
            disconnected = await caller.is_disconnected()
            await caller.send_events(rest if caller.streaming else streamed.start() + rest, last=True)
            prepared.attempt.delivered = not disconnected
        except GatewayError as error:
            if not caller.streaming:
                raise
            await caller.send_events(streamed.failure(error), last=True)

    async def _begin(self, prepared: PreparedRequest, begun: list[SampleRequest]) -> None:
        """Add one request per prompt to `begun`, each as soon as the claim may sample it."""
        for request in self._recorder.requests(prepared):
            granted = await self._claims.begin(prepared.claim, request.num_samples, request.max_tokens)
            if granted != request.max_tokens:
                request = msgspec.structs.replace(request, max_tokens=granted)
            begun.append(request)

    def _end(self, prepared: PreparedRequest, begun: list[SampleRequest]) -> None:
        for request in begun:
            self._claims.end(prepared.claim, request.num_samples, request.max_tokens)

    def _span(self, claim: OpenClaim, requests: list[SampleRequest]) -> AbstractContextManager[Any]:
        if not claim.continues:  # Of no episode.
            return nullcontext()
        tokens = sum(len(request.prompt) // 4 for request in requests)
        return call_span(claim.episode_uuid, claim.attempt, prompt_tokens=tokens)

    async def _sampled(
        self,
        prepared: PreparedRequest,
        requests: list[SampleRequest],
        progress: ProgressCallback | None = None,
    ) -> list[SampleResult]:
        """Sample. What is sampled whole will be recorded, whatever its caller does."""
        with self._span(prepared.claim, requests):
            results = await sample_all(self._sampler, requests, progress)
        prepared.attempt.is_recording = True
        return results

    async def _repeat(
        self, dialect: Dialect[Any], call: ModelCall, completion: Completion, caller: Caller, attempt: Attempt
    ) -> None:
        """Send a recorded completion."""
        disconnected = await caller.is_disconnected()
        if call.stream:
            streamed = self._streamed(dialect, call, completion)
            await caller.send_events(streamed.start() + streamed.finish(completion), last=True)
        else:
            await caller.reply(_ENCODER.encode(dialect.reply(call, completion)))
        attempt.delivered = not disconnected

    def _streamed(self, dialect: Dialect[Any], call: ModelCall, header: ReplyHeader) -> StreamedReply:
        messages = [self._recorder.partial(call) for _ in range(call.n * max(1, len(call.prompts)))]
        return StreamedReply(dialect.events(call, header), messages, self._recorder.hidden_ids(call))

    async def _models(self) -> Response:
        """The models that requests may name."""
        return Deferred(self._answer_models)

    async def _answer_models(self, caller: Caller) -> None:
        try:
            await self._claims.open(caller.key)
        except GatewayError as error:
            await caller.refuse(error.status, _ENCODER.encode(OpenAIDialect.error(error)))
            return
        models = [
            {
                "id": name,
                "object": "model",
                "created": self._started,
                "owned_by": "tinkerscript",
                "max_model_len": self._renderer.max_context,
            }
            for name in self._model_names
        ]
        await caller.reply(_ENCODER.encode({"object": "list", "data": models}))

    async def _state(self, claim: OpenClaim) -> _ClaimState:
        """The state of a claim, restored from its recorded calls if need be."""
        if not claim.continues:
            return _ClaimState(claim, Session(self._renderer), IdempotencyCache())
        key = (claim.episode_uuid, claim.attempt)
        if key not in self._states:
            # Raises if the claim is lost meanwhile, so that it leaves no state behind.
            calls = await self._claims.calls(claim)
            if key not in self._states:  # Another request may have restored it.
                session = Session.restore(self._renderer, calls)
                self._states[key] = _ClaimState(claim, session, IdempotencyCache(calls))
        return self._states[key]


class _RandomSeeds(Sampler):
    """Gives a seed to requests without one, which a run counts: the n-th has the same seed in every process.

    Where seeds are not supported, nothing counts, and the request goes on as it is.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        if request.seed is not None:
            return await self._sampler.sample(request, progress)
        seeded = msgspec.structs.replace(request, seed=random.getrandbits(31))
        try:
            return await self._sampler.sample(seeded, progress)
        except GatewayError as error:
            if error.param != "seed":
                raise
        return await self._sampler.sample(request, progress)


def create_gateway(
    *,
    claims: ClaimBook,
    sampler: Sampler,
    model_folder: Path,
    model_name: str,
    sampling: SamplingConfig,
    accepted_names: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Gateway:
    """The gateway for the model in `model_folder`, which replies call `model_name`.

    `accepted_names`: what else requests may call it; empty: anything. Raises ConfigError for a folder whose
    tokenizer, config, or chat format cannot be used.
    """
    names = list(dict.fromkeys([model_name, POLICY, model_folder.name, *accepted_names]))
    return Gateway(
        claims=claims,
        sampler=sampler,
        renderer=ChatRenderer(model_folder, chat_template_kwargs),
        model_names=names,
        any_name=not accepted_names,
        sampling=sampling,
    )


def gateway_of(config: RunConfig, *, claims: ClaimBook, sampler: Sampler) -> Gateway:
    """The gateway for the model of a run. Raises ConfigError."""
    folder = model_folder(config.engine.model)
    return create_gateway(
        claims=claims,
        sampler=sampler,
        model_folder=folder,
        model_name=model_name(folder),
        sampling=config.sampling,
        accepted_names=config.interchange_server.model_names,
        chat_template_kwargs=config.engine.chat_template_kwargs,
    )
