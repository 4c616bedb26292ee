"""Anthropic Messages.

Our extension is `return_token_ids`, which adds `prompt_token_ids` and `token_ids` (with a grammar also
`constrained`) to the reply, or to the first and the last event of a stream. Accepted and ignored:
`cache_control`, `metadata`, a tool's `strict` (arguments are what the model sampled) and
`eager_input_streaming`, and the headers `anthropic-version` and `anthropic-beta`.

`thinking` decides what is shown: thinking blocks for `enabled` and `adaptive`, none for `disabled` or null.
The model reasons as it was trained to, and everything it samples is recorded. `budget_tokens` is a target,
as it is at Anthropic; `max_tokens` is the limit.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from typing import Any

from tinkerscript.gateway.dialects.anthropic.events import MessageEvents
from tinkerscript.gateway.dialects.anthropic.reply import error_body, message_of
from tinkerscript.gateway.dialects.anthropic.request import MessagesCall, parse_count, parse_request
from tinkerscript.gateway.dialects.dialect import Completion, EventStream, ReplyHeader, TokenCounter


class AnthropicMessages(TokenCounter[MessagesCall]):
    """Anthropic's `POST /messages`."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def parse(self, body: bytes) -> MessagesCall:
        return parse_request(body)

    def parse_count(self, body: bytes) -> MessagesCall:
        return parse_count(body)

    def reply(self, call: MessagesCall, completion: Completion) -> dict[str, Any]:
        return message_of(self.tokenizer, call, completion)

    def count_reply(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def events(self, call: MessagesCall, header: ReplyHeader) -> EventStream:
        return MessageEvents(self.tokenizer, call, header)

    @staticmethod
    def error_body(
        status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> dict[str, Any]:
        return error_body(status, message, code=code, param=param)
