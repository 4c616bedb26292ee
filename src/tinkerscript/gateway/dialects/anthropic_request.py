"""Anthropic Messages: requests for a message and for the token count of its prompt.

A reply's blocks, sent back, become the sampled message.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.gateway.dialects.validation import (
    DIRECT,
    MaxTokens,
    Temperature,
    TopK,
    TopP,
    Unsupported,
    convert,
    decode,
    function_tool,
    invalid,
    required_tools,
    sampling_arguments,
    unsupported,
    unsupported_content,
)
from tinkerscript.limits import MESSAGES, STOPS, TOOLS

MESSAGE_PREFIX = "msg_"
Blocks = str | list[dict[str, Any]]


class _InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class _Block(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    cache_control: dict[str, Any] | None = None


class _Text(_Block):
    text: str
    citations: Annotated[Any, Unsupported([])] = None


class _ThinkingBlock(_Block):
    thinking: str
    signature: str = ""


class _ToolUse(_Block):
    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: dict[str, Any]
    caller: Annotated[Any, Unsupported(DIRECT)] = None
    toolset_name: Annotated[Any, Unsupported()] = None


class _ToolResult(_Block):
    tool_use_id: Annotated[str, Meta(min_length=1)]
    content: Blocks = ""
    is_error: bool = False
    toolset_name: Annotated[Any, Unsupported()] = None


class _ToolDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    # Arguments stay as the model sampled them.
    type: str = "custom"
    strict: bool = False
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool = False
    allowed_callers: Annotated[Any, Unsupported(["direct"])] = None
    defer_loading: Annotated[Any, Unsupported(False)] = None
    input_examples: Annotated[Any, Unsupported([])] = None


class MessagesCall(ModelCall, frozen=True, kw_only=True):
    FIELD_NAMES: ClassVar[Mapping[str, str]] = {
        "required_tools": "tool_choice",
        "json_schema": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }

    show_thinking: bool = False  # Reasoning is sampled regardless.


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
    model: str
    messages: Annotated[list[_InputMessage], Meta(min_length=1, max_length=MESSAGES.limit)]
    system: Blocks | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS.limit)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    # Accepted and ignored.
    cache_control: dict[str, Any] | None = None
    context_management: Annotated[Any, Unsupported()] = None
    mcp_servers: Annotated[Any, Unsupported([])] = None
    speed: Annotated[Any, Unsupported("standard")] = None


class _Request(_Prompt, kw_only=True):
    max_tokens: MaxTokens
    stop_sequences: Annotated[list[str], Meta(max_length=STOPS.limit)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    return_token_ids: bool | None = None
    # Accepted and ignored.
    metadata: dict[str, Any] | None = None
    container: Annotated[Any, Unsupported()] = None
    diagnostics: Annotated[Any, Unsupported()] = None
    inference_geo: Annotated[Any, Unsupported()] = None
    service_tier: Annotated[Any, Unsupported("auto", "standard_only")] = None
    thread: Any = None


_REQUEST = msgspec.json.Decoder(_Request)
_PROMPT = msgspec.json.Decoder(_Prompt)


def parse_request(body: bytes) -> MessagesCall:
    request = decode(_REQUEST, body)
    _refuse_thread(request)
    stops = request.stop_sequences or []
    if not all(stops):
        raise invalid("stop_sequences", "a stop sequence must not be empty")
    prompt = _prompt_arguments(request)
    return MessagesCall(
        required_tools=_required_tools(request.tool_choice, prompt["tools"]),
        parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
        json_schema=_json_schema(request.output_config),
        max_tokens=request.max_tokens,
        stop=stops,
        show_thinking=_shows_thinking(request.thinking),
        **(prompt | sampling_arguments(request)),
    )


def parse_count(body: bytes) -> MessagesCall:
    prompt = decode(_PROMPT, body)
    return MessagesCall(**_prompt_arguments(prompt))


def _prompt_arguments(prompt: _Prompt) -> dict[str, Any]:
    refused = prompt.tool_choice is not None and prompt.tool_choice.type == "none"
    return {
        "model": prompt.model,
        "messages": normalized_messages(prompt.messages, prompt.system),
        "tools": normalized_tools(prompt.tools or ()),
        "parse_tool_calls": bool(prompt.tools) and not refused,
    }


def _refuse_thread(request: _Request) -> None:
    # Then Anthropic's tool runner sends the whole history.
    if request.thread is not None:
        message = "this server keeps no threads; send the whole history and leave thread out"
        raise GatewayError(400, "thread_unsupported_request", message, param="thread")


def _required_tools(choice: _ToolChoice | None, tools: Sequence[Tool]) -> list[str]:
    if choice is None or choice.type in ("auto", "none"):
        return []
    if choice.type == "any":
        return required_tools(None, tools)
    if not choice.name:
        raise invalid("tool_choice.name", "tool_choice of the type 'tool' needs a name")
    return required_tools([choice.name], tools)


def _json_schema(config: _OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    return config.format.schema_ or {"type": "object"}


def _shows_thinking(thinking: _Thinking | None) -> bool:
    if thinking is None:
        return False
    if thinking.display is not None:
        raise unsupported(
            "thinking.display", thinking.display, "leave it out to see the thinking as it was sampled"
        )
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise invalid(
            "thinking.budget_tokens",
            "budget_tokens is required for the type 'enabled', and only allowed there",
        )
    return thinking.type != "disabled"


def normalized_messages(messages: Sequence[_InputMessage], system: Blocks | None) -> list[ChatMessage]:
    normalized: list[ChatMessage] = []
    if system:
        normalized.append({"role": "system", "content": _text(system, "system")})
    reply: ChatMessage | None = None
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        if message.role != "assistant":
            reply = None
            normalized += _user(message.role, message.content, where)
            continue
        if reply is None:
            # Anthropic treats consecutive assistant messages as one.
            reply = {"role": "assistant", "content": ""}
            normalized.append(reply)
        _extend_reply(reply, message.content, where)
    if reply is not None:
        message = "the last message is the assistant's; prefilling the reply is not supported"
        raise GatewayError(400, "unsupported_content", message, param=f"messages[{len(messages) - 1}].role")
    return normalized


def normalized_tools(tools: Iterable[dict[str, Any]]) -> list[Tool]:
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> Tool:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise unsupported(f"{where}.type", kind, "only tools that your program runs are supported (custom)")
    definition = convert(tool, _ToolDefinition, where)
    return function_tool(definition.name, definition.description, definition.input_schema)


def _user(role: str, content: Blocks, where: str) -> Iterable[ChatMessage]:
    if isinstance(content, str) or not content:
        return [{"role": role, "content": content or ""}]
    found: list[ChatMessage] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if block.get("type") == "tool_result" and role == "user":
            found.append(_tool_result(block, at))
            continue
        text = _text_block(block, at)
        if found and found[-1]["role"] == role:
            found[-1]["content"] += text
        else:
            found.append({"role": role, "content": text})
    return found


def _tool_result(block: dict[str, Any], where: str) -> ChatMessage:
    result = convert(block, _ToolResult, where)
    content = _text(result.content, f"{where}.content")
    message: ChatMessage = {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
    if result.is_error:
        # Chat formats have no field for it.
        message["is_error"] = True
    return message


def _extend_reply(reply: ChatMessage, content: Blocks, where: str) -> None:
    if isinstance(content, str):
        reply["content"] += content
        return
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        match block.get("type"):
            case "thinking":
                _add_thinking(reply, convert(block, _ThinkingBlock, at))
            case "tool_use":
                reply.setdefault("tool_calls", []).append(_tool_call(block, at))
            case _:
                reply["content"] += _text_block(block, at)


def _add_thinking(reply: ChatMessage, block: _ThinkingBlock) -> None:
    if block.thinking:
        reply["reasoning_content"] = reply.get("reasoning_content", "") + block.thinking
    if block.signature.startswith(MESSAGE_PREFIX):
        reply["id"] = block.signature.removeprefix(MESSAGE_PREFIX)


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    use = convert(block, _ToolUse, where)
    function = {"name": use.name, "arguments": json.dumps(use.input, ensure_ascii=False)}
    return {"id": use.id, "type": "function", "function": function}


def _text(content: Blocks, where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_block(block, f"{where}[{index}]") for index, block in enumerate(content))


def _text_block(block: dict[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        if not isinstance(kind, str):
            raise invalid(f"{where}.type", "a content block needs a type")
        raise unsupported_content(kind, where)
    return convert(block, _Text, where).text
