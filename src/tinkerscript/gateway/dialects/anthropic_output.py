"""Anthropic's replies and errors: content blocks, stop reasons, usage.

The signature of a thinking block is the id of its message, by which the session finds the answer again. It
proves nothing: thinking that was edited becomes a fork, since texts are compared.

Source: https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.dialects.anthropic_input import MESSAGE_PREFIX
from tinkerscript.gateway.dialects.base import Choice, Completion, ModelCall, matched_stop, reasoning_tokens
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids

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


class MessagesCall(ModelCall, frozen=True, kw_only=True):
    """A request for a message."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "must_call": "tool_choice",
        "json_schema": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }

    show_thinking: bool = False
    """Whether the reply has thinking blocks. Reasoning is sampled and recorded either way."""


def message_id(call_id: str) -> str:
    """Id of a message, and signature of its thinking."""
    return f"{MESSAGE_PREFIX}{call_id}"


def message_of(tokenizer: LightTokenizer, call: MessagesCall, completion: Completion) -> dict[str, Any]:
    """The reply."""
    (choice,) = completion.choices
    message: dict[str, Any] = {
        "id": message_id(completion.call_id),
        "type": "message",
        "role": "assistant",
        "model": completion.model,
        "content": blocks_of(completion.call_id, choice.message, thinking=call.show_thinking),
        **stop_of(tokenizer, call, choice),
        "usage": usage_of(tokenizer, completion.prompt, choice),
    }
    if call.return_token_ids:
        message["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
        message["token_ids"] = unpack_ids(choice.sampled).tolist()
    return message


def blocks_of(call_id: str, message: ChatMessage, *, thinking: bool) -> list[dict[str, Any]]:
    """The content of an answer; there may be none."""
    blocks: list[dict[str, Any]] = []
    if thinking and (reasoning := message.get("reasoning_content")):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": message_id(call_id)})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    return blocks + [tool_use_block(call) for call in message.get("tool_calls", ())]


def tool_use_block(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as the text that the record holds."""
    function = call["function"]
    arguments = msgspec.Raw(function["arguments"].encode())
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def stop_of(tokenizer: LightTokenizer, call: ModelCall, choice: Choice) -> dict[str, Any]:
    """`stop_reason`, and the `stop_sequence` that was sampled, if one was."""
    if matched := matched_stop(tokenizer, choice, call.stop):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[choice.finish_reason], "stop_sequence": None}


def usage_of(tokenizer: LightTokenizer, prompt: bytes, choice: Choice | None) -> dict[str, Any]:
    """Token counts; those of the prompt alone while there is no choice yet."""
    usage: dict[str, Any] = {
        "input_tokens": len(prompt) // 4,
        "output_tokens": len(choice.sampled) // 4 if choice else 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    if choice:
        usage["output_tokens_details"] = {"thinking_tokens": reasoning_tokens(tokenizer, choice)}
    return usage


def error_body(error: GatewayError) -> dict[str, Any]:
    """An error as Anthropic writes it; our stable code is its `error_code`."""
    # Programs know this error by its first words.
    too_long = error.code == "context_length_exceeded"
    body = refusal_body(error.status, f"prompt is too long: {error.message}" if too_long else error.message)
    body["error"]["details"] = {"error_code": error.code} | ({"param": error.param} if error.param else {})
    return body


def refusal_body(status: int, message: str) -> dict[str, Any]:
    """What a refusal with an HTTP status is in Anthropic's words."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
