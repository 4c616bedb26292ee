"""The `Dialect` seam: one class per wire format, over one neutral `ModelCall` and `Completion`.

A dialect reads a request and writes replies and errors. It keeps the promise that a field which we
do not honour is refused by name, and that no prompt text is ever added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.messages import ChatMessage, Tool

FinishReason = Literal["stop", "length", "tool_calls"]


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the model, whatever format it came in. None: the caller asked for nothing."""

    model: str
    messages: list[ChatMessage]
    """At least one, normalised."""

    tools: list[Tool]
    parse_tool_calls: bool
    """False: tool calls that the model writes stay text."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1
    """-1 for no limit."""

    seed: int | None = None
    stop: list[str] = []
    logprobs: bool = False
    return_token_ids: bool = False


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer."""

    message: ChatMessage
    sampled: bytes
    """Sampled ids (int32), the stop token included."""

    logprobs: bytes
    """One float32 for each sampled id."""

    finish_reason: FinishReason


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What answers a `ModelCall`; its choices share one prompt."""

    call_id: str
    """Id of the first choice's call."""

    created: int
    """Unix time in seconds."""

    model: str
    prompt: bytes
    """Prompt ids (int32)."""

    choices: list[Choice]
    policy_version: int


class Dialect(ABC):
    """A wire format of the gateway."""

    path: str
    """Route under the gateway's prefix, such as `/chat/completions`."""

    @abstractmethod
    def parse(self, body: bytes) -> ModelCall:
        """Read a request. Raises GatewayError 400 that names the field it cannot honour."""

    @abstractmethod
    def reply(self, call: ModelCall, completion: Completion) -> bytes:
        """The body of the answer to `call`."""

    @abstractmethod
    def error(self, error: GatewayError) -> bytes:
        """The body of an error reply."""
