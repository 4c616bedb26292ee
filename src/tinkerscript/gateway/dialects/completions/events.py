"""The chunks of a streamed text completion.

Source: https://platform.openai.com/docs/api-reference/completions/create
"""

from __future__ import annotations

from typing import Any

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.completions.reply import ChoiceWriter
from tinkerscript.gateway.dialects.dialect import (
    Completion,
    EventStream,
    MessageDelta,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.openai import DONE, OpenAIDialect, data_event, fingerprint_of, usage_of
from tinkerscript.gateway.tokenizer import LightTokenizer


class CompletionEvents(EventStream):
    """`text_completion` chunks; the usage, if requested, comes last."""

    def __init__(self, tokenizer: LightTokenizer, call: ModelCall, header: ReplyHeader) -> None:
        self._call = call
        self._writer = ChoiceWriter(tokenizer, call)
        self._prompts_sent: set[int] = set()
        self._envelope: dict[str, Any] = {
            "id": f"cmpl-{header.call_id}",
            "object": "text_completion",
            "created": header.created,
            "model": header.model,
            "system_fingerprint": None,
        }

    def start(self) -> bytes:
        return b""

    def delta(self, delta: MessageDelta) -> bytes:
        writes_tokens = delta.sampled and (self._call.logprobs or self._call.return_token_ids)
        if not delta.content and not writes_tokens:
            return b""
        with_prompt = self._call.return_token_ids and delta.index not in self._prompts_sent
        self._prompts_sent.add(delta.index)
        choice = self._writer.choice(delta.index, delta.content, delta, with_prompt=with_prompt)
        return self._chunk([choice])

    def finish(self, completion: Completion) -> bytes:
        self._envelope["system_fingerprint"] = fingerprint_of(completion)
        chunks = [
            self._chunk(
                [{"index": index, "text": "", "logprobs": None, "finish_reason": choice.finish_reason}]
            )
            for index, choice in enumerate(completion.choices)
        ]
        if self._call.stream_usage:
            chunks.append(self._chunk([], usage=usage_of(sum(map(len, self._call.prompts)) // 4, completion)))
        return b"".join((*chunks, DONE))

    def failure(self, error: GatewayError) -> bytes:
        return data_event(OpenAIDialect.error(error))

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        more = {"usage": usage} if self._call.stream_usage else {}
        return data_event(self._envelope | {"choices": choices} | more)
