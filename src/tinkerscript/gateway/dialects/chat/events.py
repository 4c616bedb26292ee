"""The chunks of a streamed chat completion.

Source: https://platform.openai.com/docs/api-reference/chat-streaming
"""

from __future__ import annotations

from typing import Any

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.chat.reply import logprobs_of
from tinkerscript.gateway.dialects.dialect import (
    Choice,
    Completion,
    EventStream,
    MessageDelta,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.openai import DONE, OpenAIDialect, data_event, fingerprint_of, usage_of
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids


class ChatCompletionEvents(EventStream):
    """`chat.completion.chunk`s, each for one choice; the usage, if requested, comes last."""

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
        written = {field: text for field, text in texts.items() if text}
        if not written and not (delta.sampled and (self._call.logprobs or self._call.return_token_ids)):
            return b""
        logprobs = logprobs_of(self._tokenizer, self._call, delta)
        tokens = {"token_ids": unpack_ids(delta.sampled).tolist()} if self._call.return_token_ids else {}
        return self._chunk(delta.index, written, logprobs=logprobs, tokens=tokens)

    def finish(self, completion: Completion) -> bytes:
        self._envelope["system_fingerprint"] = fingerprint_of(completion)
        chunks = [self._end(index, choice) for index, choice in enumerate(completion.choices)]
        if self._call.stream_usage:
            usage = usage_of(completion.prompt_tokens, completion)
            chunks.append(data_event(self._envelope | {"choices": [], "usage": usage}))
        return b"".join((*chunks, DONE))

    def failure(self, error: GatewayError) -> bytes:
        return data_event(OpenAIDialect.error(error))

    def _end(self, index: int, choice: Choice) -> bytes:
        calls: list[dict[str, Any]] = choice.message.get("tool_calls", [])
        numbered = [{"index": number, **call} for number, call in enumerate(calls)]
        tool_calls = self._chunk(index, {"tool_calls": numbered}) if numbered else b""
        tokens = choice.constraint_field() if self._call.return_token_ids else {}
        return tool_calls + self._chunk(index, {}, finish_reason=choice.finish_reason, tokens=tokens)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        tokens: dict[str, list[int]] | None = None,
        **more: Any,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **(tokens or {}),
        }
        if self._call.stream_usage:
            more["usage"] = None
        return data_event(self._envelope | {"choices": [choice]} | more)
