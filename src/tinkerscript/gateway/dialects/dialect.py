"""The `Dialect` seam: one class per wire format, over one neutral `ModelCall` and `Completion`.

A dialect parses requests and writes replies, events, and errors. Invariants: a field that this server does
not honor is refused by name, and no text is ever added to a prompt.
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
    """A request for the model, whatever format it came in. None: the caller did not set the field.

    A dialect whose replies need more of the request subclasses it.
    """

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {
        "required_tools": "tool_choice",
        "json_schema": "response_format",
        "parallel_tool_calls": "parallel_tool_calls",
    }
    """What the wire format calls the fields that a sampler may refuse."""

    model: str
    messages: list[ChatMessage]
    """Normalized; empty if and only if there are `prompts`."""

    tools: list[Tool]
    parse_tool_calls: bool
    """False: tool calls that the model writes stay text."""

    template_kwargs: dict[str, Any] = {}
    """Arguments of the chat template that the caller asks for."""

    prompts: list[bytes] = []
    """Prompts as ids (int32), in place of messages. Each gets `n` plain-text completions."""

    previous: str | None = None
    """Id of an earlier call of the same claim whose conversation `messages` continue."""

    store: bool = False
    """Whether a later request may name the reply as `previous`; it always may in an episode."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    """Ids that end the reply, besides those that end a turn. They are no part of its text."""

    logprobs: bool = False
    top_logprobs: int = 0
    """How many of the most likely ids to report at each sampled position."""

    required_tools: list[str] = []
    """The reply must call one of these. Empty: the model decides."""

    parallel_tool_calls: bool = True
    """Whether one reply may call several tools."""

    json_schema: dict[str, Any] | None = None
    """JSON schema of the reply; `{"type": "object"}` for any object. A tool call may stand in its place."""

    return_token_ids: bool = False
    stream: bool = False
    """Whether the reply is sent as events while it is sampled."""

    stream_usage: bool = False
    """Whether the last event of a stream reports token usage."""

    ignored: list[str] = []
    """Fields that agent mode left out of the request (`AGENT_FIELDS`)."""

    side: bool = False
    """Whether an agent asked for the policy as `SIDE_MODEL`."""


class Choice(SampledTokens, frozen=True, kw_only=True):
    """One sampled reply and its tokens."""

    message: ChatMessage
    finish_reason: FinishReason
    constrained: bytes = b""
    """What a grammar did to each sampled id (uint8 `TokenConstraint`); empty without one."""

    reported_tokens: int = 0
    """How many tokens a server that gives no ids has counted."""

    @property
    def num_tokens(self) -> int:
        return len(self.sampled) // 4 or self.reported_tokens

    def token_fields(self) -> dict[str, list[int]]:
        """Our extension of a reply, for a caller that asks for token ids."""
        ids = unpack_ids(self.sampled).tolist()
        return {"token_ids": ids, **self.constraint_field()}

    def constraint_field(self) -> dict[str, list[int]]:
        """Our extension of the end of a streamed reply, whose ids have been sent."""
        return {"constrained": list(self.constrained)} if self.constrained else {}


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a reply before anything is sampled."""

    call_id: str
    """Id of the first choice's call."""

    created: int
    """Unix time in seconds."""

    model: str
    prompt: bytes
    """Ids of the first prompt (int32)."""

    reported_prompt_tokens: int = 0
    """How many tokens a server that gives no ids has counted."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the first prompt."""
        return len(self.prompt) // 4 or self.reported_prompt_tokens


class Completion(ReplyHeader, frozen=True, kw_only=True):
    """The result of a `ModelCall`."""

    choices: list[Choice]
    """Those of the first prompt come first."""

    policy_version: int
    """Below 0: of weights that the run never published."""


class MessageDelta(SampledTokens, frozen=True, kw_only=True):
    """New text and tokens of one choice. The two are not aligned: text may be held back for a while."""

    index: int
    """Which choice."""

    content: str = ""
    """Text that can no longer change: concatenated, the deltas are the message's content."""

    reasoning: str = ""
    """Like `content`, for the message's reasoning."""


class EventStream(ABC):
    """One streamed reply. Each method returns the bytes to send now, possibly none."""

    @abstractmethod
    def start(self) -> bytes:
        """The events that precede the first token."""

    @abstractmethod
    def delta(self, delta: MessageDelta) -> bytes:
        """The events for new text and tokens of one choice."""

    @abstractmethod
    def finish(self, completion: Completion) -> bytes:
        """The last events: tool calls, why each choice ended, usage, the end of the stream.

        All content, reasoning, and ids have gone through `delta`, and the calls are recorded.
        """

    @abstractmethod
    def failure(self, error: GatewayError) -> bytes:
        """The last events after an error."""


CallT = TypeVar("CallT", bound=ModelCall)


class Dialect(ABC, Generic[CallT]):
    """A wire format of the gateway: a subclass's docstring describes its route in the API's documentation."""

    path: ClassVar[str]
    """The route, such as `/v1/chat/completions`."""

    def __init__(self, tokenizer: LightTokenizer, *, agent_mode: bool = False) -> None:
        """`tokenizer` encodes text prompts, and gives the text and bytes of single tokens. `agent_mode`:
        whether requests may have the fields of `AGENT_FIELDS`.
        """
        self.tokenizer = tokenizer
        self.agent_mode = agent_mode

    def read(self, parse: Callable[[bytes], CallT], body: bytes) -> CallT:
        """Parse a request with `parse`, in agent mode without the fields of the table.

        Raises GatewayError 400, also for a call that is beyond one of `limits`.
        """
        if not self.agent_mode:
            return within_limits(parse(body))
        body, ignored = without_agent_fields(self.path, body)
        call = within_limits(parse(body))
        return msgspec.structs.replace(call, ignored=ignored, side=call.model == SIDE_MODEL)

    @abstractmethod
    def parse(self, body: bytes) -> CallT:
        """Parse a request. Raises GatewayError 400 that names the field that is invalid or unsupported."""

    @abstractmethod
    def reply(self, call: CallT, completion: Completion) -> dict[str, Any]:
        """The body of the reply to `call`."""

    @abstractmethod
    def events(self, call: CallT, header: ReplyHeader) -> EventStream:
        """The events of a streamed reply to `call`."""

    @staticmethod
    @abstractmethod
    def error_body(
        status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> dict[str, Any]:
        """The body of an error reply with this HTTP status."""

    @classmethod
    def error(cls, error: GatewayError) -> dict[str, Any]:
        """The body of the reply that `error` is."""
        message = error.message[: limits.REASON_CHARS]
        return cls.error_body(error.status, message, code=error.code, param=error.param)


class TokenCounter(Dialect[CallT]):
    """A dialect with a second route, which counts the tokens of a prompt."""

    count_path: ClassVar[str]

    @abstractmethod
    def parse_count(self, body: bytes) -> CallT:
        """Parse a request whose prompt is to be counted. Raises GatewayError 400."""

    @abstractmethod
    def count_reply(self, tokens: int) -> dict[str, Any]:
        """The body of the reply."""


def within_limits(call: CallT) -> CallT:
    """`call`. Raises GatewayError 400 for what no call of any wire format may have."""
    limits.MODEL_CHARS.check(len(call.model))
    limits.PREVIOUS.check(len(call.previous or ""))
    limits.MESSAGES.check(len(call.messages))
    for index, message in enumerate(call.messages):
        if len(message) > 2:  # Besides role and content.
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
    # No deeper than they have brackets: most need no second look.
    depth = limits.TOOLS_DEPTH
    if encoded.count(b"{") + encoded.count(b"[") > depth.limit and limits.depth_is_beyond(tools, depth.limit):
        raise depth.refusal(depth.limit + 1)


def named_event(data: dict[str, Any]) -> bytes:
    """One server-sent event, named after its data's `type` (OpenAI Responses, Anthropic).

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(data) + b"\n\n"


def reasoning_tokens(tokenizer: LightTokenizer, choice: Choice) -> int:
    """How many sampled ids are reasoning, markers included.

    All of them if the reasoning was cut off; 0 for a format that closes reasoning with another marker.
    """
    marker = tokenizer.convert_tokens_to_ids(THINK_END)
    if marker is None or not choice.message.get("reasoning_content"):
        return 0
    ids = unpack_ids(choice.sampled).tolist()
    return ids.index(marker) + 1 if marker in ids else len(ids)
