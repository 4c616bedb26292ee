"""The model endpoint: a key opens a claim, its session makes the prompt, every call is recorded.

Owns the HTTP routes and the sessions of the open claims. The invariant: a reply leaves only after
the calls behind it are recorded, and a request that failed or was given up records nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response

from tinkerscript.config import SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.claims import ClaimBook, OpenClaim
from tinkerscript.gateway.dialects import ChatCompletions, Choice, Completion, Dialect, ModelCall
from tinkerscript.gateway.messages import ChatMessage
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.sampler import SampledSequence, Sampler, SampleRequest, SampleResult
from tinkerscript.gateway.session import Session, Turn
from tinkerscript.rollouts.call import Call, unpack_ids

POLICY = "policy"
"""The name by which any program may ask for the model that is being trained."""

RETRY_AFTER_S = 1
"""Seconds that a 429 or 503 reply asks the caller to wait."""

_JSON = "application/json"
_CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """What the gateway has served since it started. The numbers only grow."""

    calls: int
    """Calls recorded; each choice of a request counts."""

    sampled_tokens: int
    breaks: Mapping[str, int]
    """Prompts that extend no earlier call of their claim, by cause."""


class Gateway:
    """OpenAI-compatible routes over a `Sampler`, authenticated and recorded by a `ClaimBook`."""

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
        self._sampling = sampling
        self._sessions: dict[tuple[str, int], Session] = {}
        self._calls = 0
        self._sampled_tokens = 0
        self._breaks: Counter[str] = Counter()
        self._started = int(time.time())
        self.router = APIRouter(prefix="/v1", tags=["model"])
        for dialect in (ChatCompletions(renderer.tokenizer),):
            self._add_dialect(dialect)
        self.router.add_api_route("/models", self._models, methods=["GET"], response_model=None)

    def forget(self, episode_uuid: str, attempt: int) -> None:
        """Drop the token buffers of a claim that ended or lapsed."""
        self._sessions.pop((episode_uuid, attempt), None)

    def statistics(self) -> GatewayStatistics:
        """A snapshot of the counters."""
        return GatewayStatistics(self._calls, self._sampled_tokens, MappingProxyType(dict(self._breaks)))

    def _add_dialect(self, dialect: Dialect) -> None:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._serve(dialect, request)
            except GatewayError as error:
                return error_response(dialect, error)

        self.router.add_api_route(
            dialect.path,
            endpoint,
            methods=["POST"],
            response_model=None,
            name=type(dialect).__name__,
            description=dialect.__doc__,
        )

    async def _serve(self, dialect: Dialect, request: Request) -> Response:
        body = await request.body()
        # No await from here to the sampler: a claim that is lost meanwhile leaves no session behind.
        claim = self._claims.open(bearer_key(request))
        call = dialect.parse(body)
        if call.model not in self._model_names:
            known = " or ".join(repr(name) for name in self._model_names)
            message = f"the model {call.model!r} does not exist here; use {known}"
            raise GatewayError(404, "model_not_found", message, param="model")
        session = self._session(claim)
        turn = session.plan(call.messages, call.tools)
        with self._claims.in_flight(claim, self._sample_request(call, turn)) as sample:
            result = await _unless_gone(self._sampler.sample(sample), request)
            if result is None:
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            completion = await self._record(claim, session, call, turn, result)
        return Response(dialect.reply(call, completion), media_type=_JSON)

    async def _models(self, request: Request) -> Response:
        """The models that requests may name."""
        try:
            self._claims.open(bearer_key(request))
        except GatewayError as error:
            return error_response(ChatCompletions(self._renderer.tokenizer), error)
        models = [
            {"id": name, "object": "model", "created": self._started, "owned_by": "tinkerscript"}
            for name in self._model_names
        ]
        return Response(msgspec.json.encode({"object": "list", "data": models}), media_type=_JSON)

    def _session(self, claim: OpenClaim) -> Session:
        key = (claim.episode_uuid, claim.attempt)
        if not claim.continues:
            return Session.restore(self._renderer, [])
        session = self._sessions.get(key)
        if session is None:
            session = Session.restore(self._renderer, self._claims.calls(claim))
            self._sessions[key] = session
        return session

    def _sample_request(self, call: ModelCall, turn: Turn) -> SampleRequest:
        """The caller's parameters, the config's where it gave none; never more than the context holds."""
        left = self._renderer.max_context - len(turn.prompt) // 4
        asked = self._sampling.max_tokens if call.max_tokens is None else call.max_tokens
        return SampleRequest(
            prompt=turn.prompt,
            max_tokens=min(asked, left),
            num_samples=call.n,
            temperature=self._sampling.temperature if call.temperature is None else call.temperature,
            top_p=call.top_p,
            top_k=call.top_k,
            seed=call.seed,
            stop_token_ids=self._renderer.stop_token_ids,
            stop=call.stop,
        )

    async def _record(
        self, claim: OpenClaim, session: Session, call: ModelCall, turn: Turn, result: SampleResult
    ) -> Completion:
        if len(result.sequences) != call.n:
            message = f"the engine answered {len(result.sequences)} sequences where {call.n} were asked for"
            raise GatewayError(502, "engine_error", message)
        call_id = uuid4().hex
        choices: list[Choice] = []
        for index, sequence in enumerate(result.sequences):
            message = self._renderer.parse(
                unpack_ids(sequence.sampled).tolist(), ParseOptions(call.parse_tool_calls, call.stop)
            )
            recorded = self._call(
                f"{call_id}-{index}" if index else call_id, call, turn, result, sequence, message
            )
            await self._claims.record(claim, recorded)
            session.add(turn, recorded.call_id, sequence.sampled, message)
            self._count(recorded)
            choices.append(_choice(sequence, message))
        return Completion(
            call_id=call_id,
            created=int(time.time()),
            model=self._model_names[0],
            prompt=turn.prompt,
            choices=choices,
            policy_version=result.policy_version,
        )

    def _call(
        self,
        call_id: str,
        call: ModelCall,
        turn: Turn,
        result: SampleResult,
        sequence: SampledSequence,
        reply: ChatMessage,
    ) -> Call:
        return Call(
            call_id=call_id,
            parent_id=turn.parent.call_id if turn.parent else None,
            new_prompt=turn.new_prompt,
            sampled=sequence.sampled,
            logprobs=sequence.logprobs,
            stop_reason=sequence.stop_reason,
            policy_version=result.policy_version,
            temperature=self._sampling.temperature if call.temperature is None else call.temperature,
            top_p=call.top_p,
            top_k=call.top_k,
            logprob_kind=result.logprob_kind,
            break_cause=turn.break_cause,
            messages=msgspec.json.encode(turn.new_messages).decode(),
            reply=msgspec.json.encode(reply).decode(),
            tools="[]" if turn.parent else msgspec.json.encode(turn.tools).decode(),
        )

    def _count(self, call: Call) -> None:
        self._calls += 1
        self._sampled_tokens += len(call.sampled) // 4
        if call.break_cause:
            self._breaks[call.break_cause] += 1


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


def bearer_key(request: Request) -> str:
    """The API key of a request. Raises GatewayError 401 if it carries none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        message = "send the claim's API key as `Authorization: Bearer KEY`"
        raise GatewayError(401, "invalid_api_key", message)
    return key.strip()


def error_response(dialect: Dialect, error: GatewayError) -> Response:
    """`error` in the dialect's shape, with what a retrying client needs to know."""
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 409:
        # OpenAI's clients repeat a 409 unless told that it is final.
        headers["x-should-retry"] = "false"
    return Response(dialect.error(error), error.status, headers, _JSON)


async def _unless_gone(sampling: Awaitable[SampleResult], request: Request) -> SampleResult | None:
    """The result, or None if the client went away first; the sample is cancelled then."""
    sample = asyncio.ensure_future(sampling)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((sample, gone), return_when=asyncio.FIRST_COMPLETED)
        return sample.result() if sample.done() else None
    finally:
        sample.cancel()
        gone.cancel()
        await asyncio.gather(sample, gone, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _choice(sequence: SampledSequence, message: ChatMessage) -> Choice:
    called = sequence.stop_reason == "stop" and "tool_calls" in message
    return Choice(
        message=message,
        sampled=sequence.sampled,
        logprobs=sequence.logprobs,
        finish_reason="tool_calls" if called else sequence.stop_reason,
    )
