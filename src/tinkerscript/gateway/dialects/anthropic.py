"""Anthropic Messages: the route, its replies, events and errors (docs/protocol.md).

A thinking block's signature is its message's id, by which the session finds the reply. Tool calls come last,
each in one delta.

Source: https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/api/messages-streaming,
https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.dialects.anthropic_request import (
    MESSAGE_PREFIX,
    MessagesCall,
    parse_count,
    parse_request,
)
from tinkerscript.gateway.dialects.dialect import (
    Choice,
    Completion,
    EventStream,
    MessageDelta,
    ModelCall,
    ReplyHeader,
    TokenCounter,
    named_event,
    reasoning_tokens,
)
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.tokenizer import LightTokenizer

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_id(call_id: str) -> str:
    return f"{MESSAGE_PREFIX}{call_id}"


def message_of(
    tokenizer: LightTokenizer, call: MessagesCall, header: ReplyHeader, choice: Choice | None
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": message_id(header.call_id),
        "type": "message",
        "role": "assistant",
        "model": header.model,
        "content": _blocks_of(header.call_id, choice.message, thinking=call.show_thinking) if choice else [],
        **stop_of(tokenizer, call, choice),
        "usage": usage_of(tokenizer, header.prompt_tokens, choice),
    }
    if call.return_token_ids:
        message["prompt_token_ids"] = unpack_ids(header.prompt).tolist()
        message |= choice.token_fields() if choice else {}
    return message


def _blocks_of(call_id: str, message: ChatMessage, *, thinking: bool) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking and (reasoning := message.get("reasoning_content")):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": message_id(call_id)})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    return blocks + [_tool_use_block(call) for call in message.get("tool_calls", ())]


def _tool_use_block(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = msgspec.Raw(function["arguments"].encode())
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def stop_of(tokenizer: LightTokenizer, call: ModelCall, choice: Choice | None) -> dict[str, Any]:
    if choice and (matched := _matched_stop(tokenizer, choice, call.stop)):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[choice.finish_reason] if choice else None, "stop_sequence": None}


def usage_of(tokenizer: LightTokenizer, prompt_tokens: int, choice: Choice | None) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "input_tokens": prompt_tokens,
        "output_tokens": choice.num_tokens if choice else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    if choice:
        usage["output_tokens_details"] = {"thinking_tokens": reasoning_tokens(tokenizer, choice)}
    return usage


def _matched_stop(tokenizer: LightTokenizer, choice: Choice, stops: Sequence[str]) -> str | None:
    if not stops or choice.finish_reason != "stop":
        return None
    text = tokenizer.decode(unpack_ids(choice.sampled).tolist())
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    return min(found)[1] if found else None


_Kind = Literal["thinking", "text"]


class MessageEvents(EventStream):
    def __init__(self, tokenizer: LightTokenizer, call: MessagesCall, header: ReplyHeader) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._header = header
        self._blocks = 0
        self._open: _Kind | None = None

    def start(self) -> bytes:
        message = message_of(self._tokenizer, self._call, self._header, None)
        return named_event({"type": "message_start", "message": message}) + named_event({"type": "ping"})

    def delta(self, delta: MessageDelta) -> bytes:
        sent = b""
        if delta.reasoning and self._call.show_thinking:
            sent += self._begin("thinking") + self._delta("thinking_delta", "thinking", delta.reasoning)
        if delta.content:
            sent += self._begin("text") + self._delta("text_delta", "text", delta.content)
        return sent

    def finish(self, completion: Completion) -> bytes:
        (choice,) = completion.choices
        calls: list[dict[str, Any]] = choice.message.get("tool_calls", [])
        rest = self._end() + b"".join(self._tool_use(call) for call in calls)
        end: dict[str, Any] = {
            "type": "message_delta",
            "delta": stop_of(self._tokenizer, self._call, choice),
            "usage": usage_of(self._tokenizer, completion.prompt_tokens, choice),
        }
        if self._call.return_token_ids:
            end |= choice.token_fields()
        return rest + named_event(end) + named_event({"type": "message_stop"})

    def failure(self, error: GatewayError) -> bytes:
        return named_event(AnthropicMessages.error(error))

    def _begin(self, kind: _Kind) -> bytes:
        if self._open == kind:
            return b""
        ended = self._end()
        empty = {"signature": ""} if kind == "thinking" else {}
        self._open = kind
        return ended + self._start_block({"type": kind, kind: "", **empty})

    def _end(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        if kind == "text":
            return self._stop_block()
        return (
            self._delta("signature_delta", "signature", message_id(self._header.call_id)) + self._stop_block()
        )

    def _tool_use(self, call: dict[str, Any]) -> bytes:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
        started = self._start_block(block)
        delta = self._delta("input_json_delta", "partial_json", function["arguments"])
        return started + delta + self._stop_block()

    def _start_block(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return named_event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        delta = {"type": kind, field: text}
        return named_event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _stop_block(self) -> bytes:
        return named_event({"type": "content_block_stop", "index": self._blocks - 1})


class AnthropicMessages(TokenCounter[MessagesCall]):
    """Anthropic's `POST /messages`."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def parse(self, body: bytes) -> MessagesCall:
        return parse_request(body)

    def parse_count(self, body: bytes) -> MessagesCall:
        return parse_count(body)

    def reply(self, call: MessagesCall, completion: Completion) -> dict[str, Any]:
        return message_of(self.tokenizer, call, completion, completion.choices[0])

    def count_reply(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def events(self, call: MessagesCall, header: ReplyHeader) -> EventStream:
        return MessageEvents(self.tokenizer, call, header)

    @staticmethod
    def error_body(
        status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> dict[str, Any]:
        # Programs recognize its first words.
        message = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error: dict[str, Any] = {"type": kind, "message": message}
        if code:
            error["details"] = {"error_code": code} | ({"param": param} if param else {})
        return {"type": "error", "error": error}
