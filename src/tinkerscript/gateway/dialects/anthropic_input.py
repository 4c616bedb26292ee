"""Anthropic's messages and tools in the gateway's form.

Invariant: the blocks of an answer, sent back as they came, become the message that was answered: tool-use ids
are kept, text blocks are joined, thinking may be left out; its signature names the answer. Blocks that are no
text are refused by type.

Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.dialects.base import (
    convert,
    invalid,
    refuse_unhonoured,
    unsupported,
    unsupported_content,
)

MESSAGE_PREFIX = "msg_"
"""What stands before a call's id in the id of the message that answered it."""

Blocks = str | list[dict[str, Any]]
"""Content as a text or as blocks."""


class InputMessage(Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class _Block(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    cache_control: dict[str, Any] | None = None


class _Text(_Block):
    text: str
    citations: list[Any] = []


class _Thinking(_Block):
    thinking: str
    signature: str = ""


class _ToolUse(_Block):
    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class _ToolResult(_Block):
    tool_use_id: Annotated[str, Meta(min_length=1)]
    content: Blocks = ""
    is_error: bool = False
    toolset_name: str | None = None


class _ToolDefinition(Struct, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    # Accepted, of no consequence here; arguments are what the model sampled, `strict` or not.
    type: str = "custom"
    strict: bool = False
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool = False
    # Known and not honoured: see _NEUTRAL_TOOL.
    allowed_callers: Any = None
    defer_loading: Any = None
    input_examples: Any = None


_NEUTRAL_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_DIRECT = {"type": "direct"}


def normalised(messages: Sequence[InputMessage], system: Blocks | None) -> list[ChatMessage]:
    """The conversation in the gateway's form. Raises GatewayError 400 for what it cannot hold."""
    normal: list[ChatMessage] = []
    if system:
        normal.append({"role": "system", "content": _text(system, "system")})
    answer: ChatMessage | None = None
    for index, message in enumerate(messages):
        where = f"messages[{index}].content"
        if message.role != "assistant":
            answer = None
            normal += _user(message.role, message.content, where)
            continue
        if answer is None:
            # Anthropic takes assistant messages in a row for one.
            answer = {"role": "assistant", "content": ""}
            normal.append(answer)
        _add_answer(answer, message.content, where)
    if answer is not None:
        message = "the last message is the assistant's; to begin its answer for it is not supported"
        raise GatewayError(400, "unsupported_content", message, param=f"messages[{len(messages) - 1}].role")
    return normal


def neutral_tools(tools: Iterable[dict[str, Any]]) -> list[Tool]:
    """Tools in OpenAI's form. Raises GatewayError 400 for a tool that Anthropic's servers would run."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: dict[str, Any], where: str) -> Tool:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise unsupported(f"{where}.type", kind, "only tools that your program runs can be given (custom)")
    definition = convert(tool, _ToolDefinition, where)
    refuse_unhonoured(definition, _NEUTRAL_TOOL, where)
    function: dict[str, Any] = {"name": definition.name}
    if definition.description is not None:
        function["description"] = definition.description
    return {"type": "function", "function": {**function, "parameters": definition.input_schema}}


def _user(role: str, content: Blocks, where: str) -> Iterable[ChatMessage]:
    """A message for each tool result, and one for each run of text blocks."""
    if isinstance(content, str) or not content:
        return [{"role": role, "content": content or ""}]
    found: list[ChatMessage] = []
    for place, block in enumerate(content):
        at = f"{where}[{place}]"
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
    if result.toolset_name:
        raise unsupported(f"{where}.toolset_name", result.toolset_name)
    content = _text(result.content, f"{where}.content")
    message: ChatMessage = {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
    if result.is_error:
        # Recorded; chat formats have no place for it, and nothing is added to the text.
        message["is_error"] = True
    return message


def _add_answer(answer: ChatMessage, content: Blocks, where: str) -> None:
    if isinstance(content, str):
        answer["content"] += content
        return
    for place, block in enumerate(content):
        at = f"{where}[{place}]"
        match block.get("type"):
            case "thinking":
                _add_thinking(answer, convert(block, _Thinking, at))
            case "tool_use":
                answer.setdefault("tool_calls", []).append(_tool_call(block, at))
            case _:
                answer["content"] += _text_block(block, at)


def _add_thinking(answer: ChatMessage, block: _Thinking) -> None:
    if block.thinking:
        answer["reasoning_content"] = answer.get("reasoning_content", "") + block.thinking
    if block.signature.startswith(MESSAGE_PREFIX):
        answer["id"] = block.signature.removeprefix(MESSAGE_PREFIX)


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    use = convert(block, _ToolUse, where)
    if use.caller not in (None, _DIRECT):
        raise unsupported(f"{where}.caller", use.caller)
    if use.toolset_name:
        raise unsupported(f"{where}.toolset_name", use.toolset_name)
    function = {"name": use.name, "arguments": json.dumps(use.input, ensure_ascii=False)}
    return {"id": use.id, "type": "function", "function": function}


def _text(content: Blocks, where: str) -> str:
    """The text of blocks, joined as they are."""
    if isinstance(content, str):
        return content
    return "".join(_text_block(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text_block(block: dict[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind != "text":
        if not isinstance(kind, str):
            raise invalid(f"{where}.type", "a content block needs a type")
        raise unsupported_content(kind, where)
    text = convert(block, _Text, where)
    if text.citations:
        raise unsupported(f"{where}.citations", text.citations)
    return text.text
