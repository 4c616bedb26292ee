"""Anthropic Messages.

Owns the reading of requests. Our extension is `return_token_ids`: `prompt_token_ids` and `token_ids` on the
reply, or on the first and the last event of a stream. Accepted and of no consequence: `cache_control`,
`metadata`, a tool's `strict` (arguments are what the model sampled) and `eager_input_streaming`, and the
headers `anthropic-version` and `anthropic-beta`.

`thinking` chooses what is shown: `enabled` or `adaptive` gives thinking blocks, `disabled` or nothing gives
none. The model reasons as it was trained to, and all that it samples is recorded. `budget_tokens` is a
target, as it is at Anthropic, and `max_tokens` the limit.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import Tool
from tinkerscript.gateway.dialects.anthropic_events import MessageEvents
from tinkerscript.gateway.dialects.anthropic_input import Blocks, InputMessage, neutral_tools, normalised
from tinkerscript.gateway.dialects.anthropic_output import MessagesCall, error_body, message_of
from tinkerscript.gateway.dialects.base import (
    Completion,
    EventStream,
    ModelCall,
    ReplyHeader,
    TokenCounter,
    decode,
    invalid,
    must_call,
    refuse_unhonoured,
    unsupported,
)
from tinkerscript.gateway.tokenizer import LightTokenizer

MAX_STOPS = 16

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Fields that are known and not honoured, with the values that ask for nothing. None always does."""


class _Thinking(Struct, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class _ToolChoice(Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Format(Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    type: Literal["json_schema"]
    schema_: dict[str, Any]


class _OutputConfig(Struct, forbid_unknown_fields=True):
    effort: None = None
    format: _Format | None = None


class _Prompt(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both a message and its count are asked for with."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    # Accepted, of no consequence here.
    cache_control: dict[str, Any] | None = None
    # Known and not honoured: see _NEUTRAL.
    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None


class _Request(_Prompt, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    return_token_ids: bool | None = None
    # Accepted, of no consequence here.
    metadata: dict[str, Any] | None = None
    # Known and not honoured: see _NEUTRAL.
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
    # Known and not honoured: see _refuse_thread.
    thread: Any = None


_REQUEST = msgspec.json.Decoder(_Request)
_PROMPT = msgspec.json.Decoder(_Prompt)
_ENCODER = msgspec.json.Encoder()


class AnthropicMessages(TokenCounter):
    """Anthropic's `POST /messages`."""

    path = "/messages"
    count_path = "/messages/count_tokens"

    def __init__(self, tokenizer: LightTokenizer) -> None:
        """`tokenizer` finds stop sequences and the end of reasoning among the sampled ids."""
        self._tokenizer = tokenizer

    def parse(self, body: bytes) -> ModelCall:
        request = decode(_REQUEST, body)
        refuse_unhonoured(request, _NEUTRAL)
        _refuse_thread(request)
        stops = request.stop_sequences or []
        if len(stops) > MAX_STOPS or not all(stops):
            problem = f"stop_sequences must be at most {MAX_STOPS} strings, none of them empty"
            raise invalid("stop_sequences", problem)
        return MessagesCall(
            model=request.model,
            messages=normalised(request.messages, request.system),
            tools=(tools := neutral_tools(request.tools or ())),
            parse_tool_calls=_parses_tool_calls(request),
            must_call=_must_call(request.tool_choice, tools),
            parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
            json_schema=_json_schema(request.output_config),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or -1,
            stop=stops,
            return_token_ids=bool(request.return_token_ids),
            stream=bool(request.stream),
            show_thinking=_shows_thinking(request.thinking),
        )

    def parse_count(self, body: bytes) -> ModelCall:
        prompt = decode(_PROMPT, body)
        refuse_unhonoured(prompt, {name: _NEUTRAL[name] for name in _NEUTRAL if hasattr(prompt, name)})
        return MessagesCall(
            model=prompt.model,
            messages=normalised(prompt.messages, prompt.system),
            tools=neutral_tools(prompt.tools or ()),
            parse_tool_calls=_parses_tool_calls(prompt),
        )

    def count_reply(self, tokens: int) -> bytes:
        return _ENCODER.encode({"input_tokens": tokens})

    def reply(self, call: ModelCall, completion: Completion) -> bytes:
        return _ENCODER.encode(message_of(self._tokenizer, _own(call), completion))

    def error(self, error: GatewayError) -> bytes:
        return _ENCODER.encode(error_body(error))

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return MessageEvents(self._tokenizer, _own(call), header)


def _refuse_thread(request: _Request) -> None:
    """Anthropic's code for what a thread cannot do: its tool runner then sends the whole history instead."""
    if request.thread is not None:
        message = "this server keeps no threads; send the whole history and leave thread out"
        raise GatewayError(400, "thread_unsupported_request", message, param="thread")


def _own(call: ModelCall) -> MessagesCall:
    if not isinstance(call, MessagesCall):
        raise TypeError(f"{type(call).__name__} was not read by this dialect")
    return call


def _parses_tool_calls(prompt: _Prompt) -> bool:
    refused = prompt.tool_choice is not None and prompt.tool_choice.type == "none"
    return bool(prompt.tools) and not refused


def _must_call(choice: _ToolChoice | None, tools: Sequence[Tool]) -> list[str]:
    if choice is None or choice.type in ("auto", "none"):
        return []
    if choice.type == "any":
        return must_call([tool["function"]["name"] for tool in tools], tools, "tool_choice")
    if not choice.name:
        raise invalid("tool_choice.name", "tool_choice of the type 'tool' needs a name")
    return must_call([choice.name], tools, "tool_choice")


def _json_schema(config: _OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    return config.format.schema_ or {"type": "object"}


def _shows_thinking(thinking: _Thinking | None) -> bool:
    if thinking is None:
        return False
    if thinking.display is not None:
        raise unsupported("thinking.display", thinking.display, "leave it out to see the thinking as it was")
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise invalid("thinking.budget_tokens", "budget_tokens belongs to the type 'enabled', which needs it")
    return thinking.type != "disabled"
