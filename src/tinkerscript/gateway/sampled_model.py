"""`SampledModel` answers calls by sampling, and records every call as token ids.

A failed or abandoned request records nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tinkerscript.asgi import Caller
from tinkerscript.config import SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.claim_book import ClaimBook
from tinkerscript.gateway.conversation.session import LONG_PROMPT, Session, in_thread_if
from tinkerscript.gateway.conversation.tree import SAMPLED_AGAIN, Turn
from tinkerscript.gateway.dialects.dialect import Choice, Completion, Dialect, ModelCall, ReplyHeader
from tinkerscript.gateway.idempotency import choice_id, choice_index
from tinkerscript.gateway.named_model import ClaimState, NamedModel, PreparedRequest
from tinkerscript.gateway.partial_reply import PartialReply
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.reply_grammar import constraint_of, is_constrained
from tinkerscript.gateway.streamed_reply import StreamedReply
from tinkerscript.limits import LOGPROBS
from tinkerscript.rollouts.call import Call, TokenConstraint, unpack_ids
from tinkerscript.sampler import (
    Progress,
    ProgressCallback,
    SampledSequence,
    SampledTokens,
    Sampler,
    SampleRequest,
    SampleResult,
)


class SampledModel(NamedModel):
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
        no_images: str | None = None,
    ) -> None:
        """`accepted_names`: None accepts any name."""
        super().__init__(name, claims, renderer, role=role, no_images=no_images)
        self._sampler = sampler
        self._renderer = renderer
        self._sampling = sampling
        self._accepted_names = accepted_names
        self._other_names = other_names
        self.max_context = renderer.max_context

    def _check(self, call: ModelCall) -> None:
        if not (self._accepted_names is None or call.side or call.model in self._accepted_names):
            raise unknown_model(call.model, [*self._accepted_names, *self._other_names])
        rendered = self._renderer.template_kwargs
        if other := {
            k: value for k, value in call.template_kwargs.items() if (k, value) not in rendered.items()
        }:
            message = (
                f"chat_template_kwargs={other} are not those of this model's prompts, {rendered}; set "
                "engine.chat_template_kwargs in the run's config, which hold for all of its episodes"
            )
            raise GatewayError(400, "unsupported_parameter", message, param="chat_template_kwargs")

    async def _recorded(self, state: ClaimState, call: ModelCall, call_id: str) -> Completion | None:
        calls = await self._claims.calls(state.claim)
        return recorded_completion(call, call_id, calls, state.session, self.name)

    async def _completed(
        self, prepared: PreparedRequest, caller: Caller, live: StreamedReply | None
    ) -> Completion | None:
        async with self._granted(prepared) as requests:
            if live is None:
                results = await caller.until_disconnect(self._sampled(prepared, requests))
            else:
                sampling = asyncio.ensure_future(self._sampled(prepared, requests, live.report))
                try:
                    await live.follow(sampling, caller)
                    results = sampling.result() if sampling.done() else None
                finally:
                    sampling.cancel()
                    await asyncio.gather(sampling, return_exceptions=True)
                live.check(results or [])
            return None if results is None else await self._record(prepared, results)

    @asynccontextmanager
    async def _granted(self, prepared: PreparedRequest) -> AsyncGenerator[list[SampleRequest]]:
        granted: list[tuple[SampleRequest, int]] = []
        try:
            for number, request in enumerate(self._requests(prepared)):
                num_bytes = prepared.recorded_bytes(number)
                max_tokens = await self._claims.begin(
                    prepared.claim, request.num_samples, request.max_tokens, num_bytes
                )
                if max_tokens != request.max_tokens:
                    request = msgspec.structs.replace(request, max_tokens=max_tokens)
                granted.append((request, num_bytes))
            yield [request for request, _ in granted]
        finally:
            for request, num_bytes in granted:
                self._claims.end(prepared.claim, request.num_samples, request.max_tokens, num_bytes)

    async def _sampled(
        self,
        prepared: PreparedRequest,
        requests: list[SampleRequest],
        progress: ProgressCallback | None = None,
    ) -> list[SampleResult]:
        # A complete sample is recorded even if its caller disconnects.
        results = await sample_all(self._sampler, requests, progress)
        prepared.attempt.is_recording = True
        return results

    def _streamed(self, dialect: Dialect[Any], call: ModelCall, header: ReplyHeader) -> StreamedReply:
        messages = [self._partial(call) for _ in range(call.n * max(1, len(call.prompts)))]
        return StreamedReply(dialect.events(call, header), messages, frozenset(self._extra_stops(call)))

    def _requests(self, prepared: PreparedRequest) -> list[SampleRequest]:
        call, renderer = prepared.call, self._renderer
        max_tokens = self._sampling.reply_tokens if call.max_tokens is None else call.max_tokens
        if call.logprobs:
            each = min(max_tokens, renderer.max_context) * (1 + call.top_logprobs)
            LOGPROBS.check(call.n * len(prepared.turns) * each)
        constraint = constraint_of(call, renderer.markers, renderer.stop_token_ids)
        return [
            SampleRequest(
                prompt=turn.prompt,
                images=turn.all_images,
                max_tokens=min(max_tokens, renderer.max_context - len(turn.prompt) // 4),
                num_samples=call.n,
                **self._distribution(call),
                seed=call.seed,
                stop_token_ids=renderer.stop_token_ids,
                extra_stop_ids=self._extra_stops(call),
                stop=call.stop,
                top_logprobs=call.top_logprobs,
                constraint=constraint,
                stream=call.stream,
                affinity=prepared.claim.episode_uuid if prepared.claim.continues else "",
                role=self.role,
                known=(len(turn.prompt) - len(turn.new_prompt)) // 4,
            )
            for turn in prepared.turns
        ]

    def _partial(self, call: ModelCall) -> PartialReply:
        if call.prompts:
            return self._renderer.partial_text(call.stop)
        return self._renderer.partial(ParseOptions(call.parse_tool_calls, call.stop))

    async def _record(self, prepared: PreparedRequest, results: Sequence[SampleResult]) -> Completion:
        call, header = prepared.call, prepared.header
        for result in results:
            if len(result.sequences) != call.n:
                message = f"the engine returned {len(result.sequences)} sequences for a request for {call.n}"
                raise GatewayError(502, "engine_error", message)
        sequences = [(result, sequence) for result in results for sequence in result.sequences]
        messages = [
            await in_thread_if(len(sequence.sampled) >= LONG_PROMPT, self._parse, call, sequence)
            for _, sequence in sequences
        ]
        turns = [turn for turn in prepared.session.recording(prepared.turns) for _ in range(call.n)]
        recorded = [
            self._call(choice_id(header.call_id, number), prepared, turn, *sampled, message)
            for number, (turn, sampled, message) in enumerate(zip(turns, sequences, messages, strict=True))
        ]
        # All or none: a failed request leaves nothing to train on.
        await self._claims.record(prepared.claim, recorded)
        choices: list[Choice] = []
        for turn, (_, sequence), message, made in zip(turns, sequences, messages, recorded, strict=True):
            prepared.session.add(turn, made.call_id, sequence.sampled, message)
            choices.append(_choice(sequence, made, message))
        if call.store:
            self._claims.keep(prepared.claim, recorded)
        prepared.attempt.call_id = header.call_id
        return Completion(
            call_id=header.call_id,
            created=header.created,
            model=header.model,
            prompt=header.prompt,
            choices=choices,
            policy_version=recorded[0].policy_version,
        )

    def _distribution(self, call: ModelCall) -> dict[str, Any]:
        own = self._sampling.temperature
        if self._sampling.precedence == "run":
            return {"temperature": own}
        return {
            "temperature": own if call.temperature is None else call.temperature,
            "top_p": call.top_p,
            "top_k": call.top_k,
            "min_p": call.min_p,
            "repetition_penalty": call.repetition_penalty,
        }

    def _extra_stops(self, call: ModelCall) -> list[int]:
        return [token for token in call.stop_token_ids if token not in self._renderer.stop_token_ids]

    def _parse(self, call: ModelCall, sequence: SampledSequence) -> ChatMessage:
        ids = unpack_ids(sequence.sampled).tolist()
        if ids and ids[-1] in self._extra_stops(call):
            ids = ids[:-1]
        if call.prompts:
            return {"role": "assistant", "content": self._renderer.text(ids, call.stop)}
        return self._renderer.parse(ids, ParseOptions(call.parse_tool_calls, call.stop, call.tools))

    def _call(
        self,
        call_id: str,
        prepared: PreparedRequest,
        turn: Turn,
        result: SampleResult,
        sequence: SampledSequence,
        reply: ChatMessage,
    ) -> Call:
        call = prepared.call
        constrained, logprob_kind = sequence.constrained, result.logprob_kind
        messages, tools = ("", "") if choice_index(call_id) % call.n else turn.texts
        if is_constrained(call) and not constrained:
            # The sampler did not report where the constraint applied.
            constrained = bytes([TokenConstraint.UNKNOWN]) * (len(sequence.sampled) // 4)
            logprob_kind = "unknown"
        spans = sequence.spans or [(result.policy_version, 0)]
        fork_reason = turn.fork_reason
        if turn.parent is None and choice_index(call_id) % call.n:
            fork_reason = SAMPLED_AGAIN
        return Call(
            call_id=call_id,
            new_prompt=turn.new_prompt,
            sampled=sequence.sampled,
            logprobs=sequence.logprobs,
            stop_reason=sequence.stop_reason,
            policy_version=spans[0][0],
            **prepared.recorded_fields(turn),
            **self._distribution(call),
            logprob_kind=logprob_kind,
            policy_version_end=spans[-1][0] if len(spans) > 1 else result.policy_version_end,
            spans=spans if len(spans) > 1 else [],
            seed=result.seed,
            constrained=constrained,
            experts=sequence.experts,
            tokenizer=self._renderer.tokenizer.fingerprint,
            fork_reason=fork_reason,
            messages=messages,
            reply=msgspec.json.encode(reply).decode(),
            tools=tools,
            role=self.role,
        )


def unknown_model(name: str, known: Collection[str]) -> GatewayError:
    names = " or ".join(repr(each) for each in known)
    message = f"the model {name!r} does not exist here; use {names} (interchange_server.model_names)"
    return GatewayError(404, "model_not_found", message, param="model")


def recorded_completion(
    call: ModelCall, call_id: str, calls: Iterable[Call], session: Session, model: str
) -> Completion | None:
    """None for several prompts or top logprobs (not recorded), or if choices are missing after a restart."""
    if call.top_logprobs or len(call.prompts) > 1:
        return None
    ids = [choice_id(call_id, index) for index in range(call.n)]
    known = {each.call_id: each for each in calls if each.call_id in ids}
    if len(known) < len(ids):
        return None
    first = known[call_id]
    recorded = ((known[each], session.reply_of(each)) for each in ids)
    return Completion(
        call_id=call_id,
        created=first.created,
        model=model,
        prompt=session.prompt_of(call_id),
        choices=[
            _choice(SampledTokens(sampled=each.sampled, logprobs=each.logprobs), each, reply)
            for each, reply in recorded
        ],
        policy_version=first.policy_version,
    )


def _choice(tokens: SampledTokens, recorded: Call, message: ChatMessage) -> Choice:
    called = recorded.stop_reason == "stop" and "tool_calls" in message
    return Choice(
        message=message,
        finish_reason="tool_calls" if called else recorded.stop_reason,
        constrained=recorded.constrained,
        sampled=tokens.sampled,
        logprobs=tokens.logprobs,
        top_ids=tokens.top_ids,
        top_logprobs=tokens.top_logprobs,
    )


async def sample_all(
    sampler: Sampler, requests: Sequence[SampleRequest], progress: ProgressCallback | None = None
) -> list[SampleResult]:
    if len(requests) == 1:
        return [await sampler.sample(requests[0], progress)]
    tasks: list[asyncio.Task[SampleResult]] = []
    first = 0
    for request in requests:
        tasks.append(asyncio.ensure_future(sampler.sample(request, _shifted(first, progress))))
        first += request.num_samples
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shifted(first: int, progress: ProgressCallback | None) -> ProgressCallback | None:
    if progress is None:
        return None

    def report(news: Progress) -> None:
        progress(msgspec.structs.replace(news, index=first + news.index))

    return report
