"""Chat completion requests: every field is honored, or refused by name.

`developer` messages become system messages. A tool's `strict` is accepted and not enforced: unless
`tool_choice` requires a call, arguments are what the model sampled.

Source: https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.dialects import openai
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.gateway.dialects.openai import MAX_TOP_LOGPROBS, GenerationRequest
from tinkerscript.gateway.dialects.validation import (
    decode,
    invalid,
    refuse_unsupported_fields,
    required_tools,
    unsupported,
    unsupported_content,
)

_NO_OPS: dict[str, tuple[Any, ...]] = {
    **openai.NO_OPS,
    "modalities": (["text"],),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "verbosity": (),
}
"""Fields that are known and not supported, with the values that change nothing."""


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = ""
    # The `openai` client adds it to messages that it streamed or parsed: the arguments again.
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
    # The `openai` client adds it to messages that it streamed or parsed: the content again.
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


class _Request(GenerationRequest, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted and ignored.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known and not supported: see _NO_OPS.
    modalities: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    verbosity: Any = None


_DECODER = msgspec.json.Decoder(_Request)


def parse_chat_request(body: bytes) -> ModelCall:
    """Raises GatewayError 400 that names the field that is invalid or unsupported."""
    request = decode(_DECODER, body)
    refuse_unsupported_fields(request, _NO_OPS)
    tools = [_tool(tool.function) for tool in request.tools or ()]
    return ModelCall(
        messages=[_normalized(message, index) for index, message in enumerate(request.messages)],
        tools=tools,
        parse_tool_calls=bool(tools) and request.tool_choice != "none",
        max_tokens=_max_tokens(request),
        logprobs=bool(request.logprobs),
        top_logprobs=_top_logprobs(request),
        required_tools=_required_tools(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        json_schema=_json_schema(request.response_format),
        template_kwargs=request.chat_template_kwargs or {},
        **request.shared_arguments(),
    )


def _required_tools(choice: str | dict[str, Any] | None, tools: list[Tool]) -> list[str]:
    """The tools of which one must be called."""
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return required_tools([tool["function"]["name"] for tool in tools], tools, "tool_choice")
    function: Any = None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
    name: Any = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        remedy = "use 'auto', 'none', 'required', or {'type': 'function', 'function': {'name': NAME}}"
        raise unsupported("tool_choice", choice, remedy)
    return required_tools([name], tools, "tool_choice")


def _json_schema(wanted: _ResponseFormat | None) -> dict[str, Any] | None:
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


def _max_tokens(request: _Request) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", f"max_tokens={old} contradicts max_completion_tokens={new}")
    return old if new is None else new


def _tool(function: _ToolFunction) -> Tool:
    definition: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        definition["description"] = function.description
    if function.parameters is not None:
        definition["parameters"] = function.parameters
    return {"type": "function", "function": definition}


def _normalized(message: _Message, index: int) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise invalid(f"messages[{index}].content", f"a message of the role {role!r} needs content")
    normalized: ChatMessage = {"role": role, "content": _text(message.content, index)}
    if message.name:
        normalized["name"] = message.name
    if role == "assistant":
        _add_assistant_fields(normalized, message)
    elif message.tool_calls:
        raise invalid(f"messages[{index}].tool_calls", f"a message of the role {role!r} has no tool_calls")
    if role == "tool":
        if not message.tool_call_id:
            raise invalid(f"messages[{index}].tool_call_id", "a tool message needs a tool_call_id")
        normalized["tool_call_id"] = message.tool_call_id
    return normalized


def _add_assistant_fields(normalized: ChatMessage, message: _Message) -> None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        normalized["reasoning_content"] = reasoning
    if message.tool_calls:
        normalized["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    """The text of a message: its parts, concatenated."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for position, part in enumerate(content):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise unsupported_content(part.get("type"), f"messages[{index}].content[{position}]")
        texts.append(text)
    return "".join(texts)
