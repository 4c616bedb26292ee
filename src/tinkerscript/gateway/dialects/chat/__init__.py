"""OpenAI chat completions.

Our extensions, all only with `return_token_ids`: `token_ids` on a choice, with a grammar also `constrained`
(`TokenConstraint`s), `prompt_token_ids` on the reply, and `token_id` on a logprob entry. Requests may also
set `top_k`.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from typing import Any

from tinkerscript.gateway.dialects.chat.events import ChatCompletionEvents
from tinkerscript.gateway.dialects.chat.reply import chat_completion
from tinkerscript.gateway.dialects.chat.request import parse_chat_request
from tinkerscript.gateway.dialects.dialect import Completion, EventStream, ModelCall, ReplyHeader
from tinkerscript.gateway.dialects.openai import OpenAIDialect


class ChatCompletions(OpenAIDialect[ModelCall]):
    """OpenAI's `POST /chat/completions`."""

    path = "/v1/chat/completions"

    def parse(self, body: bytes) -> ModelCall:
        return parse_chat_request(body)

    def reply(self, call: ModelCall, completion: Completion) -> dict[str, Any]:
        return chat_completion(self.tokenizer, call, completion)

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return ChatCompletionEvents(self.tokenizer, call, header)
