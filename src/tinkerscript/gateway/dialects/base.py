"""The `Dialect` seam: one class per wire format, over one neutral `ModelCall` and `Completion`.

A dialect reads a request and writes replies and errors. It keeps the promise that a field which we
do not honour is refused by name, and that no prompt text is ever added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.messages import ChatMessage, Tool

FinishReason = Literal["stop", "length", "tool_calls"]


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the model, whatever format it came in. None: the caller asked for nothing.

    A dialect whose replies need more of the request than this extends it.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "must_call": "tool_choice",
        "json_schema": "response_format",
        "parallel_tool_calls": "parallel_tool_calls",
    }
    """What the caller calls the fields that an engine may refuse."""

    model: str
    messages: list[ChatMessage]
    """At least one, normalised; none where there are `prompts`."""

    tools: list[Tool]
    parse_tool_calls: bool
    """False: tool calls that the model writes stay text."""

    prompts: list[bytes] = []
    """Prompts as ids (int32), instead of messages: each is answered by plain text, `n` times."""

    previous: str | None = None
    """Id of a call of the same claim whose conversation `messages` go on from."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1
    """-1 for no limit."""

    seed: int | None = None
    stop: list[str] = []
    logprobs: bool = False
    top_logprobs: int = 0
    """How many alternatives to tell at each sampled position."""

    must_call: list[str] = []
    """Tools of which the answer must call one. Empty: the model decides."""

    parallel_tool_calls: bool = True
    """Whether one answer may call several tools."""

    json_schema: dict[str, Any] | None = None
    """JSON schema of the answer, `{"type": "object"}` for any object. Tool calls may answer instead."""

    return_token_ids: bool = False
    stream: bool = False
    """Whether the reply goes out as events while it is sampled."""

    stream_usage: bool = False
    """Whether the last event of a stream tells the usage."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer."""

    message: ChatMessage
    sampled: bytes
    """Sampled ids (int32), the stop token included."""

    logprobs: bytes
    """One float32 for each sampled id."""

    finish_reason: FinishReason
    top_ids: bytes = b""
    """The most probable ids of each position (int32 [R, call.top_logprobs]), best first."""

    top_logprobs: bytes = b""
    """float32 [R, call.top_logprobs]"""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What answers a `ModelCall`. Of several prompts the choices of the first one come first."""

    call_id: str
    """Id of the first choice's call."""

    created: int
    """Unix time in seconds."""

    model: str
    prompt: bytes
    """Prompt ids (int32), of the first prompt."""

    choices: list[Choice]
    policy_version: int


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a reply before anything is sampled."""

    call_id: str
    """Id of the first choice's call."""

    created: int
    """Unix time in seconds."""

    model: str
    prompt: bytes
    """Prompt ids (int32), of the first prompt."""


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one choice. Text and ids are not aligned: text may be held back a while."""

    index: int
    content: str = ""
    """Text that can no longer change: all deltas together are the message's content."""

    reasoning: str = ""
    """As `content`, for the message's reasoning."""

    sampled: bytes = b""
    """Sampled ids (int32)."""

    logprobs: bytes = b""
    """One float32 for each sampled id."""

    top_ids: bytes = b""
    """As in `Choice`, of these ids."""

    top_logprobs: bytes = b""


class EventStream(ABC):
    """One streamed reply. Each method returns the bytes to send now; there may be none."""

    @abstractmethod
    def start(self) -> bytes:
        """The events before anything is sampled."""

    @abstractmethod
    def delta(self, delta: MessageDelta) -> bytes:
        """The events for what is new of one choice."""

    @abstractmethod
    def finish(self, completion: Completion) -> bytes:
        """The last events. All content, reasoning and ids went through `delta`; the calls are recorded.

        What is left to tell: tool calls, why each choice ended, usage, and that the stream is over.
        """

    @abstractmethod
    def failure(self, error: GatewayError) -> bytes:
        """The last events after an error; nothing follows."""


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

    @abstractmethod
    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        """The events that answer `call`, which asked for a stream."""


class TokenCounter(Dialect):
    """A dialect that can also tell how many tokens a prompt has."""

    count_path: str
    """Route under the gateway's prefix."""

    @abstractmethod
    def parse_count(self, body: bytes) -> ModelCall:
        """Read a request whose prompt is to be counted. Raises GatewayError 400."""

    @abstractmethod
    def count_reply(self, tokens: int) -> bytes:
        """The body of the answer."""
