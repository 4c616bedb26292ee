"""The wire formats that the gateway speaks."""

from tinkerscript.gateway.dialects.anthropic_messages import AnthropicMessages
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
