"""Reading a request for a chat completion: every field is honoured, or refused by name.

Our extensions: `top_k` and `return_token_ids`. `developer` messages are system messages. A tool's `strict` is
accepted and not enforced: unless `tool_choice` demands a call, arguments are what the model sampled.

Source: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.dialects.base import (
    ModelCall,
    decode,
    invalid,
    refuse_unhonoured,
    unsupported,
    unsupported_content,
)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "verbosity": (),
}
"""Fields that are known and not honoured, with the values that ask for nothing. None always does."""


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = ""
    # What `openai` adds to the messages that it streamed or parsed: the arguments once more.
    parsed_arguments: Any = None


class _ToolCall(Struct, forbid_unknown_fields=True):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    # What `openai` adds to the messages that it streamed or parsed: the content once more.
    parsed: Any = None


class _ToolFunction(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, forbid_unknown_fields=True):
    function: _ToolFunction
    type: Literal["function"] = "function"


class _JsonSchema(Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    name: str
    schema_: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class _ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream is wanted. Random padding of chunks is not."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(Struct, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted, of no consequence here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known and not honoured: see _NEUTRAL.
    frequency_penalty: Any = None
    logit_bias: Any = None
    modalities: Any = None
    presence_penalty: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    verbosity: Any = None


_DECODER = msgspec.json.Decoder(_Request)


def parse_chat_request(body: bytes) -> ModelCall:
    """Raises GatewayError 400 that names the field it cannot honour."""
    request = decode(_DECODER, body)
    refuse_unhonoured(request, _NEUTRAL)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > MAX_STOPS or not all(stop):
        raise invalid("stop", f"stop must be at most {MAX_STOPS} strings, none of them empty")
    return ModelCall(
        model=request.model,
        messages=[_normalised(message, index) for index, message in enumerate(request.messages)],
        tools=[_neutral_tool(tool.function) for tool in request.tools or ()],
        parse_tool_calls=bool(request.tools) and request.tool_choice != "none",
        n=request.n or 1,
        max_tokens=_max_tokens(request),
        temperature=request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or -1,
        seed=request.seed,
        stop=stop,
        logprobs=bool(request.logprobs),
        top_logprobs=_top_logprobs(request),
        must_call=_must_call(request),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        json_schema=_json_schema(request),
        return_token_ids=bool(request.return_token_ids),
        stream=bool(request.stream),
        stream_usage=_stream_usage(request),
    )


def _must_call(request: _Request) -> list[str]:
    """The tools of which one must be called."""
    choice, names = request.tool_choice, [tool.function.name for tool in request.tools or ()]
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        if not names:
            raise invalid("tool_choice", "tool_choice='required' needs tools")
        return names
    function: Any = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
    name: Any = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        remedy = "use 'auto', 'none', 'required', or {'type': 'function', 'function': {'name': NAME}}"
        raise unsupported("tool_choice", choice, remedy)
    if name not in names:
        raise invalid("tool_choice", f"tool_choice names {name!r}, which is not among the tools")
    return [name]


def _json_schema(request: _Request) -> dict[str, Any] | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema", "response_format of the type 'json_schema' needs one")
    return wanted.json_schema.schema_ or {"type": "object"}


def _top_logprobs(request: _Request) -> int:
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs=true")
    return request.top_logprobs or 0


def _stream_usage(request: _Request) -> bool:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options is only allowed with stream=true")
    return bool(request.stream_options and request.stream_options.include_usage)


def _max_tokens(request: _Request) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", f"max_tokens={old} contradicts max_completion_tokens={new}")
    return old if new is None else new


def _neutral_tool(function: _ToolFunction) -> Tool:
    neutral: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        neutral["description"] = function.description
    if function.parameters is not None:
        neutral["parameters"] = function.parameters
    return {"type": "function", "function": neutral}


def _normalised(message: _Message, index: int) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise invalid(f"messages[{index}].content", f"a message of the role {role!r} needs content")
    normal: ChatMessage = {"role": role, "content": _text(message.content, index)}
    if message.name:
        normal["name"] = message.name
    if role == "assistant":
        _add_assistant_fields(normal, message)
    elif message.tool_calls:
        raise invalid(f"messages[{index}].tool_calls", f"a message of the role {role!r} has no tool_calls")
    if role == "tool":
        if not message.tool_call_id:
            raise invalid(f"messages[{index}].tool_call_id", "a tool message needs a tool_call_id")
        normal["tool_call_id"] = message.tool_call_id
    return normal


def _add_assistant_fields(normal: ChatMessage, message: _Message) -> None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        normal["reasoning_content"] = reasoning
    if message.tool_calls:
        normal["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    """The text of a message: parts are joined as they are."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise unsupported_content(part.get("type"), f"messages[{index}].content[{place}]")
        texts.append(text)
    return "".join(texts)
