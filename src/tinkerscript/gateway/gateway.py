"""The model endpoint: a key opens a claim, its session makes the prompt, every call is recorded.

Owns the HTTP routes and the sessions of the open claims. The invariant: a reply leaves only after
the calls behind it are recorded, and a request that failed or was given up records nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Response

from tinkerscript.asgi.caller import CLIENT_CLOSED_REQUEST, Caller, CallerGoneError, Deferred, Responder
from tinkerscript.config import SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import go_on
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.conversation.session import Session, Turn
from tinkerscript.gateway.dialects import (
    AnthropicMessages,
    ChatCompletions,
    Completion,
    Completions,
    Dialect,
    ModelCall,
    ReplyHeader,
    Responses,
    TokenCounter,
)
from tinkerscript.gateway.idempotency import Attempt, IdempotencyCache, RequestFingerprint, read_mark
from tinkerscript.gateway.recording import GatewayStatistics, Planned, Recorder, recorded_answer, sample_all
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.sampler import Sampler, SampleRequest
from tinkerscript.gateway.streamed_reply import StreamedReply

PREFIX = "/v1"
"""Of all routes."""

POLICY = "policy"
"""The name by which any program may ask for the model that is being trained."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What is kept in memory of an open claim."""

    session: Session
    originals: IdempotencyCache


class Gateway:
    """Routes for models over a `Sampler`, authenticated and recorded by a `ClaimBook`."""

    router: APIRouter
    """Routes under `/v1`, to be included in the server's application."""

    def __init__(
        self,
        *,
        claims: ClaimBook,
        sampler: Sampler,
        renderer: ChatRenderer,
        model_names: list[str],
        sampling: SamplingConfig,
    ) -> None:
        """`model_names[0]` is the name that replies carry; requests may use any of them."""
        self._claims = claims
        self._sampler = sampler
        self._renderer = renderer
        self._model_names = model_names
        self._claimed: dict[tuple[str, int], _Held] = {}
        self._recorder = Recorder(claims, renderer, sampling)
        self._started = int(time.time())
        self.routes: dict[str, Responder] = {}
        """Who answers a POST, by whole path: for `ModelRoutes`."""

        self.router = APIRouter(prefix=PREFIX, tags=["model"])
        for dialect in (ChatCompletions, Completions, Responses, AnthropicMessages):
            self._add_dialect(dialect(renderer.tokenizer))
        self.router.add_api_route("/models", self._models, methods=["GET"], response_model=None)

    def forget(self, episode_uuid: str, attempt: int) -> None:
        """Drop what is held of a claim that ended or lapsed."""
        self._claimed.pop((episode_uuid, attempt), None)

    def statistics(self) -> GatewayStatistics:
        """A snapshot of the counters."""
        return self._recorder.statistics()

    def _add_dialect(self, dialect: Dialect) -> None:
        name = type(dialect).__name__
        self._add_route(dialect.path, partial(self.answer, dialect), name, dialect.__doc__ or "")
        if isinstance(dialect, TokenCounter):
            description = f"How many tokens the prompt of a `{dialect.path}` request has; nothing is sampled."
            self._add_route(dialect.count_path, partial(self.count, dialect), f"{name}Count", description)

    def _add_route(self, path: str, answer: Responder, name: str, description: str) -> None:
        async def endpoint() -> Response:
            return Deferred(answer)

        self.routes[PREFIX + path] = answer
        self.router.add_api_route(
            path, endpoint, methods=["POST"], response_model=None, name=name, description=description
        )

    async def answer(self, dialect: Dialect, caller: Caller) -> None:
        """Serve one request of the dialect."""
        try:
            body = await caller.body()
            mark = read_mark(caller.headers, dialect.path, body)
            while True:
                claim = self._claims.open(caller.key)
                held = await self._held(claim)
                attempt = held.originals.in_flight(mark)
                if attempt is None:
                    break
                if await caller.unless_gone(attempt.over.wait()) is None:
                    return
            await self._answer(dialect, caller, body, mark, claim, held)
        except GatewayError as error:
            await caller.refuse(dialect, error)
        except CallerGoneError:
            return

    async def _answer(
        self,
        dialect: Dialect,
        caller: Caller,
        body: bytes,
        mark: RequestFingerprint,
        claim: OpenClaim,
        held: _Held,
    ) -> None:
        call = self._continued(held.session, dialect.parse(body))
        with held.originals.attempt(mark) as attempt:
            if original := held.originals.take(mark):
                calls = await self._claims.calls(claim)
                completion = recorded_answer(call, original, calls, held.session, self._model_names[0])
                if completion:
                    attempt.call_id = original
                    await self._repeat(dialect, call, completion, caller, attempt)
                    return
            planned = self._plan(claim, held.session, call, attempt)
            try:
                await (self._stream if call.stream else self._serve)(dialect, planned, caller)
            finally:
                for turn in planned.turns:
                    held.session.release(turn)

    async def count(self, dialect: TokenCounter, caller: Caller) -> None:
        """Tell how many tokens the prompt of one request of the dialect has."""
        try:
            body = await caller.body()
            session = (await self._held(self._claims.open(caller.key))).session
            call = self._continued(session, dialect.parse_count(body))
            await caller.reply(dialect.count_reply(session.prompt_tokens(call.messages, call.tools)))
        except GatewayError as error:
            await caller.refuse(dialect, error)
        except CallerGoneError:
            return

    def _plan(self, claim: OpenClaim, session: Session, call: ModelCall, attempt: Attempt) -> Planned:
        turns: list[Turn] = []
        try:
            for prompt in call.prompts:
                turns.append(session.plan_ids(prompt))
            if not call.prompts:
                turns.append(session.plan(call.messages, call.tools))
        except GatewayError:
            for turn in turns:
                session.release(turn)
            raise
        header = ReplyHeader(
            call_id=uuid4().hex, created=int(time.time()), model=self._model_names[0], prompt=turns[0].prompt
        )
        return Planned(claim, call, session, turns, header, attempt)

    def _continued(self, session: Session, call: ModelCall) -> ModelCall:
        """`call` with all of its messages. Raises GatewayError for a model or a call that is not here."""
        if call.model not in self._model_names:
            known = " or ".join(repr(name) for name in self._model_names)
            message = f"the model {call.model!r} does not exist here; use {known}"
            raise GatewayError(404, "model_not_found", message, param="model")
        if call.previous is None:
            return call
        before = session.messages_of(call.previous)
        return msgspec.structs.replace(call, messages=go_on(before, call.messages))

    async def _serve(self, dialect: Dialect, planned: Planned, caller: Caller) -> None:
        with self._in_flight(planned) as requests:
            results = await caller.unless_gone(sample_all(self._sampler, requests))
            if results is None:
                await caller.reply(b"", status=CLIENT_CLOSED_REQUEST)
                return
            completion = await self._recorder.record(planned, results)
        if not await caller.hung_up():
            await caller.reply(dialect.reply(planned.call, completion))
            planned.attempt.delivered = True

    @contextmanager
    def _in_flight(self, planned: Planned) -> Generator[list[SampleRequest]]:
        """What to sample, one request for each prompt, while the claim counts it."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(self._claims.in_flight(planned.claim, request))
                for request in self._recorder.requests(planned)
            ]

    async def _stream(self, dialect: Dialect, planned: Planned, caller: Caller) -> None:
        live = self._live(dialect, planned.call, planned.header)
        try:
            with self._in_flight(planned) as requests:
                results = await live.follow(partial(sample_all, self._sampler, requests), caller)
                if results is None:
                    return
                completion = await self._recorder.record(planned, results)
            rest = live.finish(completion)
            gone = await caller.hung_up()
            await caller.send_events(rest if caller.streaming else live.begin() + rest, last=True)
            planned.attempt.delivered = not gone
        except GatewayError as error:
            if not caller.streaming:
                raise
            await caller.send_events(live.failure(error), last=True)

    async def _repeat(
        self, dialect: Dialect, call: ModelCall, completion: Completion, caller: Caller, attempt: Attempt
    ) -> None:
        """Answer with what is recorded."""
        gone = await caller.hung_up()
        if call.stream:
            header = ReplyHeader(
                call_id=completion.call_id,
                created=completion.created,
                model=completion.model,
                prompt=completion.prompt,
            )
            live = self._live(dialect, call, header)
            await caller.send_events(live.begin() + live.finish(completion), last=True)
        else:
            await caller.reply(dialect.reply(call, completion))
        attempt.delivered = not gone

    def _live(self, dialect: Dialect, call: ModelCall, header: ReplyHeader) -> StreamedReply:
        messages = [self._recorder.live(call) for _ in range(call.n * max(1, len(call.prompts)))]
        return StreamedReply(dialect.events(call, header), messages, top_logprobs=call.top_logprobs)

    async def _models(self) -> Response:
        """The models that requests may name."""
        return Deferred(self._answer_models)

    async def _answer_models(self, caller: Caller) -> None:
        try:
            self._claims.open(caller.key)
        except GatewayError as error:
            await caller.refuse(ChatCompletions(self._renderer.tokenizer), error)
            return
        models = [
            {"id": name, "object": "model", "created": self._started, "owned_by": "tinkerscript"}
            for name in self._model_names
        ]
        await caller.reply(msgspec.json.encode({"object": "list", "data": models}))

    async def _held(self, claim: OpenClaim) -> _Held:
        """What is kept of an open claim; read back once after a restart."""
        key = (claim.episode_uuid, claim.attempt)
        if not claim.continues:
            return _Held(Session(self._renderer), IdempotencyCache())
        held = self._claimed.get(key)
        if held is None:
            # No await after this one: a claim that is lost meanwhile leaves no session behind.
            calls = await self._claims.calls(claim)
            held = self._claimed.get(key)
            if held is None:
                held = _Held(Session.restore(self._renderer, calls), IdempotencyCache(calls))
                self._claimed[key] = held
        return held


def create_gateway(
    *,
    claims: ClaimBook,
    sampler: Sampler,
    model_folder: Path,
    model_name: str,
    sampling: SamplingConfig,
) -> Gateway:
    """The gateway for the model in `model_folder`, which replies call `model_name`.

    Raises ConfigError for a folder whose tokenizer, config or chat format cannot be used.
    """
    names = list(dict.fromkeys([model_name, POLICY, model_folder.name]))
    renderer = ChatRenderer(model_folder)
    return Gateway(claims=claims, sampler=sampler, renderer=renderer, model_names=names, sampling=sampling)
