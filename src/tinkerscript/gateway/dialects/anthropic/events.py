"""The events of a streamed message.

Invariant: content blocks come one after another, and their deltas add up to the content of the whole reply.
Tool calls come last, each in one delta.

Source: https://docs.anthropic.com/en/api/messages-streaming
"""

from __future__ import annotations

from typing import Any, Literal

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.anthropic.reply import error_body, message_id, stop_of, usage_of
from tinkerscript.gateway.dialects.anthropic.request import MessagesCall
from tinkerscript.gateway.dialects.dialect import (
    Completion,
    EventStream,
    MessageDelta,
    ReplyHeader,
    named_event,
)
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids

_Kind = Literal["thinking", "text"]


class MessageEvents(EventStream):
    """One streamed message."""

    def __init__(self, tokenizer: LightTokenizer, call: MessagesCall, header: ReplyHeader) -> None:
        self._tokenizer = tokenizer
        self._call = call
        self._header = header
        self._blocks = 0
        """Blocks started so far."""

        self._open: _Kind | None = None

    def start(self) -> bytes:
        header = self._header
        message: dict[str, Any] = {
            "id": message_id(header.call_id),
            "type": "message",
            "role": "assistant",
            "model": header.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self._tokenizer, len(header.prompt) // 4, None),
        }
        if self._call.return_token_ids:
            message["prompt_token_ids"] = unpack_ids(header.prompt).tolist()
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
        return named_event(error_body(error.status, error.message, code=error.code, param=error.param))

    def _begin(self, kind: _Kind) -> bytes:
        """Open a block, unless it is open already."""
        if self._open == kind:
            return b""
        ended = self._end()
        empty = {"signature": ""} if kind == "thinking" else {}
        self._open = kind
        return ended + self._start_block({"type": kind, kind: "", **empty})

    def _end(self) -> bytes:
        """Close the open block, if any."""
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
