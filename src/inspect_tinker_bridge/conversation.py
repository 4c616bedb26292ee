"""Conversations as plain dictionaries (OpenAI's chat format) and as Inspect's messages.

Invariant: nothing is dropped. Tool arguments are JSON text; reasoning is `reasoning_content`; a tool's error
is its `error`; content that is neither text nor reasoning raises ConversionError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentReasoning,
    ContentText,
    ModelOutput,
)
from inspect_ai.tool import ToolCall, ToolCallError

from inspect_tinker_bridge.errors import ConversionError

MessageDict: TypeAlias = dict[str, Any]
"""`role` and `content` (text); where they apply `tool_calls`, `tool_call_id`, `name`, `reasoning_content` and
`error`."""

MODEL_NAME = "tinkerbridge/policy"
"""What Inspect calls the model that is trained."""


def to_dicts(messages: Sequence[ChatMessage]) -> list[MessageDict]:
    """Inspect's messages as dictionaries. Raises ConversionError for images and the like."""
    return [_to_dict(message) for message in messages]


def from_dicts(conversation: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Dictionaries as Inspect's messages. Raises ConversionError for an unknown role."""
    return [_from_dict(message) for message in conversation]


def final_output(messages: Sequence[ChatMessage], submit: str = "submit") -> ModelOutput:
    """What scorers score of a conversation: the answer submitted last, else the last assistant message."""
    said = [message for message in messages if isinstance(message, ChatMessageAssistant)]
    if not said:
        return ModelOutput(model=MODEL_NAME)
    output = ModelOutput.from_message(said[-1].model_copy())
    submissions = [call for call in said[-1].tool_calls or [] if call.function == submit]
    if submissions:
        output.completion = str(submissions[-1].arguments.get("answer", ""))
    return output


def _to_dict(message: ChatMessage) -> MessageDict:
    text, reasoning = _texts(message.content)
    made: MessageDict = {"role": message.role, "content": text}
    if reasoning:
        made["reasoning_content"] = reasoning
    if message.role == "assistant" and message.tool_calls:
        made["tool_calls"] = [_call_to_dict(call) for call in message.tool_calls]
    if message.role == "tool":
        made |= {"tool_call_id": message.tool_call_id or "", "name": message.function or ""}
        if message.error is not None:
            made["error"] = {"type": message.error.type, "message": message.error.message}
    return made


def _texts(content: str | Sequence[Content]) -> tuple[str, str]:
    if isinstance(content, str):
        return content, ""
    text, reasoning = "", ""
    for part in content:
        if isinstance(part, ContentText):
            text += part.text
        elif isinstance(part, ContentReasoning):
            reasoning += part.reasoning
        else:
            raise ConversionError(
                f"the conversation holds {part.type} content; only text and reasoning are supported"
            )
    return text, reasoning


def _call_to_dict(call: ToolCall) -> MessageDict:
    function = {"name": call.function, "arguments": json.dumps(call.arguments)}
    made: MessageDict = {"id": call.id, "type": "function", "function": function}
    return made | ({"parse_error": call.parse_error} if call.parse_error else {})


def _from_dict(message: Mapping[str, Any]) -> ChatMessage:
    role, text = message["role"], message.get("content") or ""
    if role == "system":
        return ChatMessageSystem(content=text)
    if role == "user":
        return ChatMessageUser(content=text)
    if role == "tool":
        error = message.get("error")
        return ChatMessageTool(
            content=text,
            tool_call_id=message.get("tool_call_id"),
            function=message.get("name"),
            error=ToolCallError(error["type"], error["message"]) if error else None,
        )
    if role != "assistant":
        raise ConversionError(f"a message has the role {role!r}; roles are system, user, assistant and tool")
    reasoning = message.get("reasoning_content")
    content: str | list[Content] = text
    if reasoning:
        content = [ContentReasoning(reasoning=reasoning), ContentText(text=text)]
    calls = [_call_from_dict(call) for call in message.get("tool_calls") or ()]
    return ChatMessageAssistant(content=content, tool_calls=calls or None)


def _call_from_dict(call: Mapping[str, Any]) -> ToolCall:
    raw, problem = call["function"]["arguments"], call.get("parse_error")
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else dict(raw)
    except ValueError as error:
        arguments, problem = {"raw_text": raw}, str(error)
    return ToolCall(
        id=call.get("id") or "", function=call["function"]["name"], arguments=arguments, parse_error=problem
    )
