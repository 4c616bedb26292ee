"""Anthropic's replies and errors: content blocks, stop reasons, usage.

The signature of a thinking block is the id of its message, by which the session finds the reply again. It
proves nothing: since texts are compared, thinking that was edited makes a fork.

Source: https://docs.anthropic.com/en/api/messages, https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.dialects.anthropic.request import MESSAGE_PREFIX, MessagesCall
from tinkerscript.gateway.dialects.dialect import Choice, Completion, ModelCall, reasoning_tokens
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


def message_id(call_id: str) -> str:
    """The id of a message, and the signature of its thinking."""
    return f"{MESSAGE_PREFIX}{call_id}"


def message_of(tokenizer: LightTokenizer, call: MessagesCall, completion: Completion) -> dict[str, Any]:
    """The reply."""
    (choice,) = completion.choices
    message: dict[str, Any] = {
        "id": message_id(completion.call_id),
        "type": "message",
        "role": "assistant",
        "model": completion.model,
        "content": _blocks_of(completion.call_id, choice.message, thinking=call.show_thinking),
        **stop_of(tokenizer, call, choice),
        "usage": usage_of(tokenizer, completion.prompt_tokens, choice),
    }
    if call.return_token_ids:
        message["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
        message |= choice.token_fields()
    return message


def _blocks_of(call_id: str, message: ChatMessage, *, thinking: bool) -> list[dict[str, Any]]:
    """The content blocks of a reply, possibly none."""
    blocks: list[dict[str, Any]] = []
    if thinking and (reasoning := message.get("reasoning_content")):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": message_id(call_id)})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    return blocks + [_tool_use_block(call) for call in message.get("tool_calls", ())]


def _tool_use_block(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments exactly as they are recorded."""
    function = call["function"]
    arguments = msgspec.Raw(function["arguments"].encode())
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def stop_of(tokenizer: LightTokenizer, call: ModelCall, choice: Choice) -> dict[str, Any]:
    """`stop_reason`, and `stop_sequence` if the model sampled one."""
    if matched := _matched_stop(tokenizer, choice, call.stop):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[choice.finish_reason], "stop_sequence": None}


def usage_of(tokenizer: LightTokenizer, prompt_tokens: int, choice: Choice | None) -> dict[str, Any]:
    """Token counts; without a choice, those of the prompt alone."""
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
    """The stop string that ended a choice: the one that starts first in the sampled text."""
    if not stops or choice.finish_reason != "stop":
        return None
    text = tokenizer.decode(unpack_ids(choice.sampled).tolist())
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error as Anthropic writes it; our stable code is its `error_code`."""
    # Programs recognize this error by its first words.
    message = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code:
        error["details"] = {"error_code": code} | ({"param": param} if param else {})
    return {"type": "error", "error": error}
