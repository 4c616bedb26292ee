"""The wire formats that the gateway speaks."""

from tinkerscript.gateway.dialects.base import (
    Choice,
    Completion,
    Dialect,
    EventStream,
    FinishReason,
    MessageDelta,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.chat_completions import ChatCompletions

__all__ = [
    "ChatCompletions",
    "Choice",
    "Completion",
    "Dialect",
    "EventStream",
    "FinishReason",
    "MessageDelta",
    "ModelCall",
    "ReplyHeader",
]
