"""What answers a request: made of what was sampled, or made again of what was recorded.

Invariant: both give the same `Completion` for the same calls.

`Recorder`: from a planned request to what is sampled, and from what was sampled to calls and the answer.

Owns the counters. The invariant: an answer is made only after every call behind it is recorded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from tinkerscript.config import SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.constraints import constraint_of, is_constrained
from tinkerscript.gateway.conversation.session import Session
from tinkerscript.gateway.conversation.tree import Turn
from tinkerscript.gateway.dialects import Choice, Completion, ModelCall, ReplyHeader
from tinkerscript.gateway.idempotency import Attempt, choice_id
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.sampler import (
    Progress,
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.gateway.streaming import LiveMessage, LiveText
from tinkerscript.rollouts.call import Call, unpack_ids


def choice_of(sequence: SampledSequence | Call, message: ChatMessage) -> Choice:
    """The choice that was sampled, or recorded, as `message`."""
    called = sequence.stop_reason == "stop" and "tool_calls" in message
    is_new = isinstance(sequence, SampledSequence)
    return Choice(
        message=message,
        sampled=sequence.sampled,
        logprobs=sequence.logprobs,
        finish_reason="tool_calls" if called else sequence.stop_reason,
        top_ids=sequence.top_ids if is_new else b"",
        top_logprobs=sequence.top_logprobs if is_new else b"",
    )


def recorded_answer(
    call: ModelCall, call_id: str, calls: Iterable[Call], session: Session, model: str
) -> Completion | None:
    """The answer to `call` that was recorded as `call_id` and its siblings among `calls`.

    None where it cannot be made again: not all of its choices were recorded when the server ended, it showed
    the likeliest tokens, which are not recorded, or it answered several prompts.
    """
    if call.top_logprobs or len(call.prompts) > 1:
        return None
    ids = [choice_id(call_id, index) for index in range(call.n)]
    known = {each.call_id: each for each in calls if each.call_id in ids}
    if len(known) < len(ids):
        return None
    first = known[call_id]
    return Completion(
        call_id=call_id,
        created=first.created,
        model=model,
        prompt=session.prompt_of(call_id),
        choices=[choice_of(known[each], session.reply_of(each)) for each in ids],
        policy_version=first.policy_version,
    )


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """What the gateway has served since it started. The numbers only grow."""

    calls: int
    """Calls recorded; each choice of a request counts."""

    sampled_tokens: int
    breaks: Mapping[str, int]
    """Prompts that extend no earlier call of their claim, by cause."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request whose prompts found their places in its claim's session."""

    claim: OpenClaim
    call: ModelCall
    session: Session
    turns: list[Turn]
    """One for each prompt; messages make one."""

    header: ReplyHeader
    attempt: Attempt


class Recorder:
    """Makes sample requests, calls and completions for one gateway."""

    def __init__(self, claims: ClaimBook, renderer: ChatRenderer, sampling: SamplingConfig) -> None:
        self._claims = claims
        self._renderer = renderer
        self._sampling = sampling
        self._calls = 0
        self._sampled_tokens = 0
        self._breaks: Counter[str] = Counter()

    def statistics(self) -> GatewayStatistics:
        """A snapshot of the counters."""
        return GatewayStatistics(self._calls, self._sampled_tokens, MappingProxyType(dict(self._breaks)))

    def requests(self, planned: Planned) -> list[SampleRequest]:
        """The caller's parameters, the config's where it gave none; never more than the context holds."""
        call, renderer = planned.call, self._renderer
        asked = self._sampling.max_tokens if call.max_tokens is None else call.max_tokens
        constraint = constraint_of(call, renderer.markers, renderer.stop_token_ids)
        return [
            SampleRequest(
                prompt=turn.prompt,
                max_tokens=min(asked, renderer.max_context - len(turn.prompt) // 4),
                num_samples=call.n,
                temperature=self._temperature(call),
                top_p=call.top_p,
                top_k=call.top_k,
                seed=call.seed,
                stop_token_ids=renderer.stop_token_ids,
                stop=call.stop,
                top_logprobs=call.top_logprobs,
                constraint=constraint,
                stream=call.stream,
            )
            for turn in planned.turns
        ]

    def live(self, call: ModelCall) -> LiveMessage | LiveText:
        """Reads one choice of `call` while it is sampled."""
        if call.prompts:
            return self._renderer.live_text(call.stop)
        return self._renderer.live(ParseOptions(call.parse_tool_calls, call.stop))

    async def record(self, planned: Planned, results: Sequence[SampleResult]) -> Completion:
        """Record what was sampled for each prompt, and answer.

        Raises GatewayError: 502 if the engine did not sample what it was asked for, 409 `claim_lost`.
        """
        call, header = planned.call, planned.header
        for result in results:
            if len(result.sequences) != call.n:
                found = len(result.sequences)
                message = f"the engine answered {found} sequences where {call.n} were asked for"
                raise GatewayError(502, "engine_error", message)
        choices: list[Choice] = []
        for turn, result in zip(planned.turns, results, strict=True):
            for sequence in result.sequences:
                message = self._read(call, sequence)
                call_id = choice_id(header.call_id, len(choices))
                recorded = self._call(call_id, planned, turn, result, sequence, message)
                await self._claims.record(planned.claim, recorded)
                planned.session.add(turn, call_id, sequence.sampled, message)
                self._count(recorded)
                choices.append(choice_of(sequence, message))
        planned.attempt.call_id = header.call_id
        return Completion(
            call_id=header.call_id,
            created=header.created,
            model=header.model,
            prompt=header.prompt,
            choices=choices,
            policy_version=results[0].policy_version,
        )

    def _temperature(self, call: ModelCall) -> float:
        return self._sampling.temperature if call.temperature is None else call.temperature

    def _read(self, call: ModelCall, sequence: SampledSequence) -> ChatMessage:
        ids = unpack_ids(sequence.sampled).tolist()
        if call.prompts:
            return {"role": "assistant", "content": self._renderer.text(ids, call.stop)}
        return self._renderer.parse(ids, ParseOptions(call.parse_tool_calls, call.stop))

    def _call(
        self,
        call_id: str,
        planned: Planned,
        turn: Turn,
        result: SampleResult,
        sequence: SampledSequence,
        reply: ChatMessage,
    ) -> Call:
        call, mark = planned.call, planned.attempt.mark
        return Call(
            call_id=call_id,
            parent_id=turn.parent.call_id if turn.parent else None,
            new_prompt=turn.new_prompt,
            sampled=sequence.sampled,
            logprobs=sequence.logprobs,
            stop_reason=sequence.stop_reason,
            policy_version=result.policy_version,
            temperature=self._temperature(call),
            top_p=call.top_p,
            top_k=call.top_k,
            logprob_kind=result.logprob_kind,
            policy_version_end=result.policy_version_end,
            seed=result.seed,
            constrained=is_constrained(call),
            matched_by=turn.matched_by,
            tokenizer=self._renderer.tokenizer.fingerprint,
            break_cause=turn.break_cause,
            messages=msgspec.json.encode(turn.new_messages).decode(),
            reply=msgspec.json.encode(reply).decode(),
            tools="[]" if turn.parent else msgspec.json.encode(turn.tools).decode(),
            created=planned.header.created,
            idempotency_key=mark.key,
            request_digest=mark.digest if mark.key else "",
        )

    def _count(self, call: Call) -> None:
        self._calls += 1
        self._sampled_tokens += len(call.sampled) // 4
        if call.break_cause:
            self._breaks[call.break_cause] += 1


async def sample_all(
    sampler: Sampler, requests: Sequence[SampleRequest], progress: ProgressCallback | None = None
) -> list[SampleResult]:
    """The results of all requests, sampled at the same time; the first error cancels the others.

    `progress` numbers the sequences of all requests one after the other.
    """
    if len(requests) == 1:
        return [await sampler.sample(requests[0], progress)]
    tasks: list[asyncio.Task[SampleResult]] = []
    first = 0
    for request in requests:
        tasks.append(asyncio.ensure_future(sampler.sample(request, _from(first, progress))))
        first += request.num_samples
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _from(first: int, progress: ProgressCallback | None) -> ProgressCallback | None:
    if progress is None:
        return None

    def tell(report: Progress) -> None:
        progress(msgspec.structs.replace(report, index=first + report.index))

    return tell
