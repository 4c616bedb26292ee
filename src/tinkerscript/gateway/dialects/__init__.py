"""The wire formats that the gateway speaks."""

from collections.abc import Callable, Mapping
from typing import Any

from tinkerscript.gateway.dialects.anthropic_messages import AnthropicMessages
from tinkerscript.gateway.dialects.anthropic_output import refusal_body
from tinkerscript.gateway.dialects.base import (
    Choice,
    Completion,
    Dialect,
    EventStream,
    FinishReason,
    MessageDelta,
    ModelCall,
    ReplyHeader,
    TokenCounter,
)
from tinkerscript.gateway.dialects.chat_completions import ChatCompletions
from tinkerscript.gateway.dialects.completions import Completions
from tinkerscript.gateway.dialects.responses import Responses

__all__ = [
    "REFUSAL_BODIES",
    "AnthropicMessages",
    "ChatCompletions",
    "Choice",
    "Completion",
    "Completions",
    "Dialect",
    "EventStream",
    "FinishReason",
    "MessageDelta",
    "ModelCall",
    "ReplyHeader",
    "Responses",
    "TokenCounter",
]


def _openai_refusal(status: int, reason: str) -> dict[str, Any]:
    return {"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": None}}


REFUSAL_BODIES: Mapping[str, Callable[[int, str], dict[str, Any]]] = {
    "/v1/messages": refusal_body,
    "/v1/": _openai_refusal,
}
"""Path prefix -> the body of a refusal there, from its status and reason; longest prefix first."""
