"""The chunks of a streamed chat completion, and what they share with whole replies.

Source: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.base import (
    Choice,
    Completion,
    EventStream,
    MessageDelta,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids, unpack_logprobs

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def error_body(error: GatewayError) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def usage_of(completion: Completion) -> dict[str, int]:
    """Token counts; the prompt counts once."""
    prompt_tokens = len(completion.prompt) // 4
    completion_tokens = sum(len(choice.sampled) for choice in completion.choices) // 4
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def fingerprint_of(completion: Completion) -> str:
    """`system_fingerprint`: it names the policy version."""
    return f"policy-{completion.policy_version}"


def logprobs_of(
    tokenizer: LightTokenizer, call: ModelCall, tokens: Choice | MessageDelta
) -> dict[str, Any] | None:
    """The `logprobs` of a choice; None if nobody asked."""
    if not call.logprobs:
        return None
    return {"content": logprob_entries(tokenizer, call, tokens), "refusal": None}


def logprob_entries(
    tokenizer: LightTokenizer, call: ModelCall, tokens: Choice | MessageDelta
) -> list[dict[str, Any]]:
    """One entry for each sampled id, the stop token included, with the alternatives that `call` asked for.

    With `return_token_ids` each has our `token_id`.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        said: dict[str, Any] = {
            "token": tokenizer.decode(token_id),
            "bytes": tokenizer.token_bytes(token_id),
            "logprob": logprob,
        }
        return {**said, "token_id": token_id} if call.return_token_ids else said

    alternatives = [entry(*pair) for pair in _pairs(tokens.top_ids, tokens.top_logprobs)]
    top = call.top_logprobs
    return [
        {**entry(*pair), "top_logprobs": alternatives[place * top : (place + 1) * top]}
        for place, pair in enumerate(_pairs(tokens.sampled, tokens.logprobs))
    ]


def _pairs(ids: bytes, logprobs: bytes) -> Iterable[tuple[int, float]]:
    return zip(unpack_ids(ids).tolist(), unpack_logprobs(logprobs).tolist(), strict=True)


class ChatCompletionEvents(EventStream):
    """`chat.completion.chunk`s. A chunk tells of one choice; the usage, if asked for, comes last."""

    def __init__(self, tokenizer: LightTokenizer, call: ModelCall, header: ReplyHeader) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._prompt = header.prompt
        self._envelope: dict[str, Any] = {
            "id": f"chatcmpl-{header.call_id}",
            "object": "chat.completion.chunk",
            "created": header.created,
            "model": header.model,
            "system_fingerprint": None,
        }

    def start(self) -> bytes:
        more: dict[str, Any] = {}
        if self._call.return_token_ids:
            more["prompt_token_ids"] = unpack_ids(self._prompt).tolist()
        opening = {"role": "assistant", "content": ""}
        first = self._chunk(0, opening, **more)
        return first + b"".join(self._chunk(index, opening) for index in range(1, self._call.n))

    def delta(self, delta: MessageDelta) -> bytes:
        texts = {"content": delta.content, "reasoning_content": delta.reasoning}
        said = {field: text for field, text in texts.items() if text}
        if not said and not (delta.sampled and (self._call.logprobs or self._call.return_token_ids)):
            return b""
        logprobs = logprobs_of(self._tokenizer, self._call, delta)
        ids = unpack_ids(delta.sampled).tolist() if self._call.return_token_ids else None
        return self._chunk(delta.index, said, logprobs=logprobs, token_ids=ids)

    def finish(self, completion: Completion) -> bytes:
        self._envelope["system_fingerprint"] = fingerprint_of(completion)
        chunks = [self._end(index, choice) for index, choice in enumerate(completion.choices)]
        if self._call.stream_usage:
            chunks.append(data_event(self._envelope | {"choices": [], "usage": usage_of(completion)}))
        return b"".join((*chunks, DONE))

    def failure(self, error: GatewayError) -> bytes:
        return data_event(error_body(error))

    def _end(self, index: int, choice: Choice) -> bytes:
        calls: list[dict[str, Any]] = choice.message.get("tool_calls", [])
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        told = self._chunk(index, {"tool_calls": numbered}) if numbered else b""
        return told + self._chunk(index, {}, finish_reason=choice.finish_reason)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        token_ids: list[int] | None = None,
        **more: Any,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if token_ids is not None:
            choice["token_ids"] = token_ids
        if self._call.stream_usage:
            more["usage"] = None
        return data_event(self._envelope | {"choices": [choice]} | more)


def data_event(data: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + _ENCODER.encode(data) + b"\n\n"
