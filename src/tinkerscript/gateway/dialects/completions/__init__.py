"""OpenAI's older text completions: text or ids in, text out, without a chat format or a BOS token.

A text prompt is encoded as it stands; a prompt of ids is sampled from as it is. Requests may also set
`top_k` and `return_token_ids`, which adds `token_ids` and `prompt_token_ids` to each choice.

Source: https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

from typing import Any

from tinkerscript.gateway.dialects.completions.events import CompletionEvents
from tinkerscript.gateway.dialects.completions.reply import text_completion
from tinkerscript.gateway.dialects.completions.request import parse_completion_request
from tinkerscript.gateway.dialects.dialect import Completion, EventStream, ModelCall, ReplyHeader
from tinkerscript.gateway.dialects.openai import OpenAIDialect


class Completions(OpenAIDialect[ModelCall]):
    """OpenAI's `POST /completions`."""

    path = "/v1/completions"

    def parse(self, body: bytes) -> ModelCall:
        return parse_completion_request(self.tokenizer, body)

    def reply(self, call: ModelCall, completion: Completion) -> dict[str, Any]:
        return text_completion(self.tokenizer, call, completion)

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return CompletionEvents(self.tokenizer, call, header)
