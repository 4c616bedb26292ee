"""`Recorder`: from a prepared request to sample requests, and from sampled tokens to recorded calls and the
completion; and `constraint_of`: what a request requires of its reply's form, as a grammar.

Invariants: a completion is made only after every call behind it is recorded; made again from the record, it
is the same. A reply that the grammar allows, and that was not cut off, is parsed by `ChatRenderer.parse` as
what was required; no text is added to the prompt.

The grammars are in llguidance's Lark dialect; `<[7]>` is the token with the id 7.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from tinkerscript.config import SamplingConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.claim_book import ClaimBook
from tinkerscript.gateway.conversation.fork_reasons import SAMPLED_AGAIN
from tinkerscript.gateway.conversation.session import LONG, Session, unblocked
from tinkerscript.gateway.conversation.tree import Turn
from tinkerscript.gateway.dialects.dialect import Choice, Completion, ModelCall
from tinkerscript.gateway.idempotency import choice_id, choice_index
from tinkerscript.gateway.named_model import PreparedRequest
from tinkerscript.gateway.partial_message import Markers, PartialMessage, PartialReply, PartialText
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.gateway.sampler import (
    Constraint,
    Progress,
    ProgressCallback,
    SampledSequence,
    SampledTokens,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.rollouts.call import Call, TokenConstraint, unpack_ids


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """What the gateway has served since it started. The numbers only grow."""

    calls: int
    """Recorded calls; each choice of a request is one."""

    sampled_tokens: int
    forks: Mapping[str, int]
    """Prompts that extend no earlier call of their claim, by reason (`fork_reasons`)."""


class Recorder:
    """Makes the sample requests, calls, and completions of one gateway, and counts them."""

    def __init__(
        self, claims: ClaimBook, renderer: ChatRenderer, sampling: SamplingConfig, role: str = ""
    ) -> None:
        """`role`: of the calls; empty for the policy."""
        self._role = role
        self._claims = claims
        self._renderer = renderer
        self._sampling = sampling
        self._calls = 0
        self._sampled_tokens = 0
        self._forks: Counter[str] = Counter()

    def statistics(self) -> GatewayStatistics:
        """A snapshot of the counters."""
        return GatewayStatistics(self._calls, self._sampled_tokens, MappingProxyType(dict(self._forks)))

    def requests(self, prepared: PreparedRequest) -> list[SampleRequest]:
        """One request per prompt, with the config's values for what the caller did not set."""
        call, renderer = prepared.call, self._renderer
        max_tokens = self._sampling.max_tokens if call.max_tokens is None else call.max_tokens
        constraint = constraint_of(call, renderer.markers, renderer.stop_token_ids)
        return [
            SampleRequest(
                prompt=turn.prompt,
                max_tokens=min(max_tokens, renderer.max_context - len(turn.prompt) // 4),
                num_samples=call.n,
                temperature=self._temperature(call),
                top_p=call.top_p,
                top_k=call.top_k,
                min_p=call.min_p,
                repetition_penalty=call.repetition_penalty,
                seed=call.seed,
                stop_token_ids=renderer.stop_token_ids,
                extra_stop_ids=self._extra_stops(call),
                stop=call.stop,
                top_logprobs=call.top_logprobs,
                constraint=constraint,
                stream=call.stream,
                affinity=prepared.claim.episode_uuid if prepared.claim.continues else "",
            )
            for turn in prepared.turns
        ]

    def partial(self, call: ModelCall) -> PartialMessage | PartialReply | PartialText:
        """Reads one choice of `call` while it is sampled."""
        if call.prompts:
            return self._renderer.partial_text(call.stop)
        return self._renderer.partial(ParseOptions(call.parse_tool_calls, call.stop))

    async def record(self, prepared: PreparedRequest, results: Sequence[SampleResult]) -> Completion:
        """Record what was sampled for each prompt.

        Raises GatewayError: 502 if the engine returned the wrong number of sequences, 409 `claim_lost`.
        """
        call, header = prepared.call, prepared.header
        for result in results:
            if len(result.sequences) != call.n:
                message = f"the engine returned {len(result.sequences)} sequences for a request for {call.n}"
                raise GatewayError(502, "engine_error", message)
        messages = [
            await unblocked(len(sequence.sampled) >= LONG, self._parse, call, sequence)
            for result in results
            for sequence in result.sequences
        ]
        turns = zip(prepared.session.recording(prepared.turns), results, strict=True)
        each = ((turn, result, sequence) for turn, result in turns for sequence in result.sequences)
        sampled = [(*parts, message) for parts, message in zip(each, messages, strict=True)]
        recorded = [
            self._call(choice_id(header.call_id, number), prepared, *parts)
            for number, parts in enumerate(sampled)
        ]
        # All choices or none: a request that failed must leave nothing that trains.
        await self._claims.record(prepared.claim, recorded)
        choices: list[Choice] = []
        for (turn, _, sequence, message), made in zip(sampled, recorded, strict=True):
            prepared.session.add(turn, made.call_id, sequence.sampled, message)
            self._count(made)
            choices.append(_choice(sequence, made, message))
        prepared.attempt.call_id = header.call_id
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

    def _extra_stops(self, call: ModelCall) -> list[int]:
        return [token for token in call.stop_token_ids if token not in self._renderer.stop_token_ids]

    def hidden_ids(self, call: ModelCall) -> frozenset[int]:
        """Ids that end a reply to `call` and have no part in its text."""
        return frozenset(self._extra_stops(call))

    def _parse(self, call: ModelCall, sequence: SampledSequence) -> ChatMessage:
        ids = unpack_ids(sequence.sampled).tolist()
        if ids and ids[-1] in self.hidden_ids(call):
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
        call, fingerprint = prepared.call, prepared.attempt.fingerprint
        constrained, logprob_kind = sequence.constrained, result.logprob_kind
        if is_constrained(call) and not constrained:
            # The sampler honored the constraint and does not tell where, nor what its logprobs are of.
            constrained = bytes([TokenConstraint.UNKNOWN]) * (len(sequence.sampled) // 4)
            logprob_kind = "unknown"
        fork_reason = turn.fork_reason
        if turn.parent is None and choice_index(call_id) % call.n:
            fork_reason = SAMPLED_AGAIN
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
            min_p=call.min_p,
            repetition_penalty=call.repetition_penalty,
            logprob_kind=logprob_kind,
            policy_version_end=result.policy_version_end,
            seed=result.seed,
            constrained=constrained,
            matched_by=turn.matched_by,
            tokenizer=self._renderer.tokenizer.fingerprint,
            fork_reason=fork_reason,
            messages=msgspec.json.encode(turn.new_messages).decode(),
            reply=msgspec.json.encode(reply).decode(),
            tools="[]" if turn.parent else msgspec.json.encode(turn.tools).decode(),
            created=prepared.header.created,
            idempotency_key=fingerprint.key,
            request_digest=fingerprint.digest if fingerprint.key else "",
            ignored=call.ignored,
            side=call.side,
            role=self._role,
        )

    def _count(self, call: Call) -> None:
        self._calls += 1
        self._sampled_tokens += len(call.sampled) // 4
        if call.fork_reason:
            self._forks[call.fork_reason] += 1


def recorded_completion(
    call: ModelCall, call_id: str, calls: Iterable[Call], session: Session, model: str
) -> Completion | None:
    """The completion of `call` that was recorded as `call_id` and its siblings among `calls`.

    None where it cannot be reproduced: the server stopped before all choices were recorded, the reply had
    top logprobs, which are not recorded, or there were several prompts.
    """
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
    """`tokens`: those of the recorded call, with alternatives if there are any."""
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


WHITE_SPACE = r"[ \n\r\t]{1,40}"
"""Allowed between the parts of a JSON value: bounded, since a model may sample white space forever."""


JsonSchema = dict[str, Any]


def constraint_of(call: ModelCall, markers: Markers | None, stop_ids: Sequence[int]) -> Constraint | None:
    """The constraint that `call` needs, if any.

    Raises GatewayError 400 for tool calls in a chat format whose markers are unknown.
    """
    asked_by = _asked_by(call)
    if asked_by is None:
        return None
    if markers is None and (call.required_tools or call.json_schema is None):
        message = f"{asked_by} is not supported for this model's chat format; leave it out"
        raise GatewayError(400, "unsupported_parameter", message, param=asked_by)
    return Constraint(grammar=_grammar(call, markers, stop_ids), asked_by=asked_by)


def is_constrained(call: ModelCall) -> bool:
    """Whether `call` needs a constraint."""
    return _asked_by(call) is not None


def _asked_by(call: ModelCall) -> str | None:
    if call.required_tools:
        return call.FIELD_NAMES["required_tools"]
    if call.json_schema is not None:
        return call.FIELD_NAMES["json_schema"]
    if call.parse_tool_calls and not call.parallel_tool_calls:
        return call.FIELD_NAMES["parallel_tool_calls"]
    return None


def _grammar(call: ModelCall, markers: Markers | None, stop_ids: Sequence[int]) -> str:
    lines = [
        "end: " + " | ".join(f"<[{token}]>" for token in stop_ids),
        "TEXT: /(.|\\n)*/",
        "WS: /[ \\n]{0,4}/",
    ]
    replies: list[str] = []
    if call.json_schema is not None and not call.required_tools:
        lines.append(f"json: %json {_schema(call.json_schema)}")
        replies.append("WS json WS")
    if markers is not None and call.parse_tool_calls:
        lines += _tool_lines(call, markers)
        replies.append("calls")
        if not replies[:-1] and not call.required_tools:
            replies = ["TEXT calls?"]
    opening = ""
    if markers is not None:
        lines.append(f"reasoning: <[{markers.think}]> TEXT <[{markers.think_end}]>")
        opening = "(WS reasoning)? WS "
    return "\n".join([f"start: {opening}({' | '.join(replies)}) end", *lines])


def _tool_lines(call: ModelCall, markers: Markers) -> list[str]:
    tools = [tool["function"] for tool in call.tools]
    allowed = [tool for tool in tools if not call.required_tools or tool["name"] in call.required_tools]
    lines: list[str] = []
    for number, tool in enumerate(allowed):
        opening = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
        lines.append(f'tool{number}: {opening} args{number} "}}"')
        lines.append(f"args{number}: %json {_schema(_object(tool.get('parameters')))}")
    names = " | ".join(f"tool{number}" for number in range(len(allowed)))
    more = '("\\n" call)*' if call.parallel_tool_calls else ""
    lines.append(f'call: <[{markers.tool_call}]> "\\n" ({names}) "\\n" <[{markers.tool_call_end}]>')
    lines.append(f"calls: call {more}")
    return lines


def _object(parameters: JsonSchema | None) -> JsonSchema:
    """The schema of arguments, which are always an object."""
    parameters = parameters or {}
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _schema(schema: JsonSchema) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


async def sample_all(
    sampler: Sampler, requests: Sequence[SampleRequest], progress: ProgressCallback | None = None
) -> list[SampleResult]:
    """Sample all requests concurrently; the first error cancels the others.

    `progress` gets the sequences of all requests under consecutive numbers.
    """
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
