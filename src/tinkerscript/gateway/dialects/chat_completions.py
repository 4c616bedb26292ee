"""OpenAI chat completions: whole replies, and which module reads requests and which makes chunks.

Our extensions: `token_ids` on a choice, `prompt_token_ids` on the reply and `token_id` on a logprob entry,
all only when asked for by `return_token_ids`.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from typing import Any

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.base import (
    Choice,
    Completion,
    Dialect,
    EventStream,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.chat_events import (
    ChatCompletionEvents,
    error_body,
    fingerprint_of,
    logprobs_of,
    usage_of,
)
from tinkerscript.gateway.dialects.chat_request import parse_chat_request
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids

_ENCODER = msgspec.json.Encoder()


class ChatCompletions(Dialect):
    """`POST /chat/completions`."""

    path = "/chat/completions"

    def __init__(self, tokenizer: LightTokenizer) -> None:
        """`tokenizer` gives the text and bytes of single tokens for `logprobs`."""
        self._tokenizer = tokenizer

    def parse(self, body: bytes) -> ModelCall:
        return parse_chat_request(body)

    def reply(self, call: ModelCall, completion: Completion) -> bytes:
        choices = [self._choice(call, choice, index) for index, choice in enumerate(completion.choices)]
        reply: dict[str, Any] = {
            "id": f"chatcmpl-{completion.call_id}",
            "object": "chat.completion",
            "created": completion.created,
            "model": completion.model,
            "system_fingerprint": fingerprint_of(completion),
            "choices": choices,
            "usage": usage_of(completion),
        }
        if call.return_token_ids:
            reply["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
        return _ENCODER.encode(reply)

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return ChatCompletionEvents(self._tokenizer, call, header)

    def error(self, error: GatewayError) -> bytes:
        return _ENCODER.encode(error_body(error))

    def _choice(self, call: ModelCall, choice: Choice, index: int) -> dict[str, Any]:
        message = choice.message
        if not message["content"] and message.get("tool_calls"):
            message = {**message, "content": None}
        built: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": logprobs_of(self._tokenizer, call, choice),
            "finish_reason": choice.finish_reason,
        }
        if call.return_token_ids:
            built["token_ids"] = unpack_ids(choice.sampled).tolist()
        return built
