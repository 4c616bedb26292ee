"""`SampledModel`: the calls of a model whose tokens we have. The claim's session makes the prompt, a
`Sampler` samples, and every call is recorded as ids.

Invariant: a request that failed or was abandoned records nothing.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec

from tinkerscript.asgi import CLIENT_CLOSED_REQUEST, Caller
from tinkerscript.config import SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.dialects.dialect import Completion, Dialect, ModelCall, ReplyHeader
from tinkerscript.gateway.named_model import ENCODER, ClaimState, NamedModel, PreparedRequest, in_step
from tinkerscript.gateway.recording import GatewayStatistics, Recorder, recorded_completion, sample_all
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.gateway.streamed_reply import StreamedReply
from tinkerscript.tracing import call_span


class SampledModel(NamedModel):
    """A model behind a `Sampler`."""

    def __init__(
        self,
        name: str,
        *,
        claims: ClaimBook,
        sampler: Sampler,
        renderer: ChatRenderer,
        sampling: SamplingConfig,
        role: str = "",
        accepted_names: Collection[str] | None = None,
        other_names: Collection[str] = (),
    ) -> None:
        """`accepted_names`: what requests may call the model; None: anything. `other_names`: of other models,
        for the error."""
        super().__init__(name, claims, renderer, role=role)
        self._sampler = sampler
        self._renderer = renderer
        self._sampling = sampling
        self._accepted_names = accepted_names
        self._other_names = other_names
        self._recorder = Recorder(claims, renderer, sampling, role)
        self.max_context = renderer.max_context

    def statistics(self) -> GatewayStatistics:
        """A snapshot of the counters."""
        return self._recorder.statistics()

    def for_others(self, claims: ClaimBook) -> SampledModel:
        """The same model for callers whose calls are not the run's, with keys of `claims`.

        The seeds of the run's own requests stay what they are, whatever these callers do.
        """
        return SampledModel(
            self.name,
            claims=claims,
            sampler=_RandomSeeds(self._sampler),
            renderer=self._renderer,
            sampling=self._sampling,
            accepted_names=self._accepted_names,
        )

    def _check(self, call: ModelCall) -> None:
        if not (self._accepted_names is None or call.side or call.model in self._accepted_names):
            raise unknown_model(call.model, [*self._accepted_names, *self._other_names])
        self._check_template_kwargs(call.template_kwargs)

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

    async def _recorded(self, state: ClaimState, call: ModelCall, call_id: str) -> Completion | None:
        calls = await self._claims.calls(state.claim)
        return recorded_completion(call, call_id, calls, state.session, self.name)

    def _whole_stream(self, dialect: Dialect[Any], call: ModelCall, completion: Completion) -> bytes:
        streamed = self._streamed(dialect, call, completion)
        return streamed.start() + streamed.finish(completion)

    async def _reply(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        requests = list[SampleRequest]()
        try:
            await self._begin(prepared, requests)
            results = await caller.until_disconnect(self._sampled(prepared, requests))
            if results is None:
                await caller.reply(b"", status=CLIENT_CLOSED_REQUEST)
                return
            await self.turns.next(prepared.size)
            completion = await self._recorder.record(prepared, results)
        finally:
            self._end(prepared, requests)
        await in_step()
        if not await caller.is_disconnected():
            await caller.reply(ENCODER.encode(dialect.reply(prepared.call, completion)))
            prepared.attempt.delivered = True

    async def _stream(self, dialect: Dialect[Any], prepared: PreparedRequest, caller: Caller) -> None:
        streamed = self._streamed(dialect, prepared.call, prepared.header)
        requests = list[SampleRequest]()
        try:
            try:
                await self._begin(prepared, requests)
                results = await streamed.follow(partial(self._sampled, prepared, requests), caller)
                if results is None:
                    return
                await self.turns.next(prepared.size)
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

    def _streamed(self, dialect: Dialect[Any], call: ModelCall, header: ReplyHeader) -> StreamedReply:
        messages = [self._recorder.partial(call) for _ in range(call.n * max(1, len(call.prompts)))]
        return StreamedReply(dialect.events(call, header), messages, self._recorder.hidden_ids(call))


def unknown_model(name: str, known: Collection[str]) -> GatewayError:
    """The refusal of a request for a model that there is not."""
    names = " or ".join(repr(each) for each in known)
    message = f"the model {name!r} does not exist here; use {names} (interchange_server.model_names)"
    return GatewayError(404, "model_not_found", message, param="model")


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
