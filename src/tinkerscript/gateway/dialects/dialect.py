"""`Dialect` is the interface of a wire format, over a neutral `ModelCall` and `Completion`.

Prompts get no added text. A field that this server does not honor is refused by name; parsing raises
GatewayError 400.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec

from tinkerscript import limits
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.dialects.agent_mode import SIDE_MODEL, without_agent_fields
from tinkerscript.gateway.dialects.validation import ONLY_TEXT
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.sampler import SampledTokens
from tinkerscript.tokenizer import THINK_END, LightTokenizer

__all__ = [
    "Choice",
    "Completion",
    "Dialect",
    "EventStream",
    "FinishReason",
    "MessageDelta",
    "ModelCall",
    "ReplyHeader",
    "TokenCounter",
    "named_event",
    "reasoning_tokens",
]


FinishReason = Literal["stop", "length", "tool_calls"]


_ENCODER = msgspec.json.Encoder()


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    # The wire format's names.
    FIELD_NAMES: ClassVar[Mapping[str, str]] = {
        "required_tools": "tool_choice",
        "json_schema": "response_format",
        "parallel_tool_calls": "parallel_tool_calls",
    }
    model: str
    messages: list[ChatMessage]  # Empty if there are `prompts`.
    tools: list[Tool]
    parse_tool_calls: bool
    """If false, tool calls stay text."""

    template_kwargs: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    """The images of `messages` by digest."""

    prompts: list[bytes] = []
    """Int32 ids instead of messages. Each gets `n` plain-text completions."""

    previous: str | None = None  # The call that `messages` continue.
    store: bool = False  # Else only an episode's later requests may name the reply.
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1  # -1: no limit.
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    # These end the reply, and are not part of its text.
    stop_token_ids: list[int] = []
    logprobs: bool = False
    top_logprobs: int = 0
    required_tools: list[str] = []  # The reply must call one of these.
    parallel_tool_calls: bool = True
    json_schema: dict[str, Any] | None = None
    """The reply may also be a tool call."""

    return_token_ids: bool = False
    stream: bool = False
    stream_usage: bool = False
    ignored: list[str] = []  # Dropped in agent mode (`AGENT_FIELDS`).
    side: bool = False


class Choice(SampledTokens, frozen=True, kw_only=True):
    message: ChatMessage
    finish_reason: FinishReason
    constrained: bytes = b""  # uint8 `TokenConstraint` per sampled id, or empty.
    reported_tokens: int = 0  # From a server that returns no ids.

    @property
    def num_tokens(self) -> int:
        return len(self.sampled) // 4 or self.reported_tokens

    def token_fields(self) -> dict[str, list[int]]:
        ids = unpack_ids(self.sampled).tolist()
        return {"token_ids": ids, **self.constraint_field()}

    def constraint_field(self) -> dict[str, list[int]]:
        return {"constrained": list(self.constrained)} if self.constrained else {}


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True):
    call_id: str
    created: int  # Unix time in seconds.
    model: str
    prompt: bytes  # Int32 ids of the first prompt.
    reported_prompt_tokens: int = 0  # From a server that returns no ids.

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4 or self.reported_prompt_tokens


class Completion(ReplyHeader, frozen=True, kw_only=True):
    choices: list[Choice]  # In the order of the prompts.
    policy_version: int  # Negative for unpublished weights.


class MessageDelta(SampledTokens, frozen=True, kw_only=True):
    """Text may be held back, so it is not aligned with tokens."""

    index: int
    content: str = ""
    reasoning: str = ""


class EventStream(ABC):
    @abstractmethod
    def start(self) -> bytes: ...

    @abstractmethod
    def delta(self, delta: MessageDelta) -> bytes: ...

    @abstractmethod
    def finish(self, completion: Completion) -> bytes:
        """Called once the calls are recorded."""

    @abstractmethod
    def failure(self, error: GatewayError) -> bytes: ...


CallT = TypeVar("CallT", bound=ModelCall)


class Dialect(ABC, Generic[CallT]):
    """A subclass's docstring is the API documentation of its route."""

    path: ClassVar[str]

    def __init__(
        self, tokenizer: LightTokenizer, *, agent_mode: bool = False, no_images: str | None = ONLY_TEXT
    ) -> None:
        """`no_images`: why images are refused, or None."""
        self.tokenizer = tokenizer
        self.agent_mode = agent_mode
        self.no_images = no_images

    def read(self, parse: Callable[[bytes], CallT], body: bytes) -> CallT:
        if not self.agent_mode:
            return within_limits(parse(body))
        body, ignored = without_agent_fields(self.path, body)
        call = within_limits(parse(body))
        return msgspec.structs.replace(call, ignored=ignored, side=call.model == SIDE_MODEL)

    @abstractmethod
    def parse(self, body: bytes) -> CallT:
        """Raises GatewayError 400."""

    @abstractmethod
    def reply(self, call: CallT, completion: Completion) -> dict[str, Any]: ...

    @abstractmethod
    def events(self, call: CallT, header: ReplyHeader) -> EventStream: ...

    @staticmethod
    @abstractmethod
    def error_body(
        status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> dict[str, Any]: ...

    @classmethod
    def error(cls, error: GatewayError) -> dict[str, Any]:
        message = error.message[: limits.REASON_CHARS]
        return cls.error_body(error.status, message, code=error.code, param=error.param)


class TokenCounter(Dialect[CallT]):
    count_path: ClassVar[str]

    @abstractmethod
    def parse_count(self, body: bytes) -> CallT:
        """Raises GatewayError 400."""

    @abstractmethod
    def count_reply(self, tokens: int) -> dict[str, Any]: ...


def within_limits(call: CallT) -> CallT:
    limits.MODEL_CHARS.check(len(call.model))
    limits.PREVIOUS.check(len(call.previous or ""))
    limits.MESSAGES.check(len(call.messages))
    for index, message in enumerate(call.messages):
        if len(message) > 2:
            _check_message(message, index)
    for stop in call.stop:
        limits.STOP_CHARS.check(len(stop))
    if call.tools:
        _check_tools(call.tools)
    if call.json_schema is not None:
        limits.SCHEMA_BYTES.check(len(_ENCODER.encode(call.json_schema)))
        if limits.depth_is_beyond(call.json_schema, limits.SCHEMA_DEPTH.limit):
            raise limits.SCHEMA_DEPTH.refusal(limits.SCHEMA_DEPTH.limit + 1)
    limits.TEMPLATE_KWARGS.check(len(call.template_kwargs))
    return call


def _check_message(message: ChatMessage, index: int) -> None:
    limits.MESSAGE_NAME.check(len(message.get("name", "")))
    limits.CALL_ID.check(len(message.get("tool_call_id", "")))
    limits.CALL_ID.check(len(message.get("id", "")))
    if calls := message.get("tool_calls"):
        limits.TOOL_CALLS.check(len(calls), f"messages[{index}].tool_calls")
        for call in calls:
            limits.CALL_ID.check(len(call["id"]), f"messages[{index}].tool_calls.id")
            limits.TOOL_NAME.check(len(call["function"]["name"]), f"messages[{index}].tool_calls.name")


def _check_tools(tools: list[Tool]) -> None:
    limits.TOOLS.check(len(tools))
    for index, tool in enumerate(tools):
        limits.TOOL_NAME.check(len(tool["function"]["name"]), f"tools[{index}].name")
    encoded = _ENCODER.encode(tools)
    limits.TOOLS_BYTES.check(len(encoded))
    # Brackets bound the depth without a walk.
    depth = limits.TOOLS_DEPTH
    if encoded.count(b"{") + encoded.count(b"[") > depth.limit and limits.depth_is_beyond(tools, depth.limit):
        raise depth.refusal(depth.limit + 1)


def named_event(data: dict[str, Any]) -> bytes:
    """Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(data) + b"\n\n"


def reasoning_tokens(tokenizer: LightTokenizer, choice: Choice) -> int:
    """Count reasoning ids and markers; 0 for other end markers."""
    marker = tokenizer.convert_tokens_to_ids(THINK_END)
    if marker is None or not choice.message.get("reasoning_content"):
        return 0
    ids = unpack_ids(choice.sampled).tolist()
    return ids.index(marker) + 1 if marker in ids else len(ids)
