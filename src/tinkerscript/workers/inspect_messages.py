"""Inspect's messages as plain OpenAI JSON and back, exactly, in microseconds.

Invariant: what the model said goes back to the server as it came, tool arguments to the character; what
cannot be expressed or honoured raises ConversionError and is never left out. Inspect's own converters take
a millisecond each way, a large part of an episode's cost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    Content,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo

from inspect_tinker_bridge import ConversionError

Json = dict[str, Any]

_SENT = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "stop_seqs": "stop",
    "seed": "seed",
    "num_choices": "n",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "parallel_tool_calls": "parallel_tool_calls",
}
"""GenerateConfig fields that the request carries, by their OpenAI names. The server refuses what it lacks."""

_INSPECTS_OWN = {
    "max_retries",
    "timeout",
    "attempt_timeout",
    "stream_idle_timeout",
    "max_connections",
    "adaptive_connections",
    "system_message",
    "max_tool_output",
    "internal_tools",
}
"""GenerateConfig fields that Inspect itself applies, or that concern its own connections."""

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "stop",
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


class Conversation:
    """The conversions of one episode. Remembers the arguments of each tool call as the server sent them."""

    def __init__(self) -> None:
        self._arguments: dict[str, tuple[str, dict[str, Any]]] = {}

    def request(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> Json:
        """The body of a chat completions request. Raises ConversionError naming what it cannot carry."""
        body: Json = {"model": "policy", "messages": [self._message(message) for message in messages]}
        if tools:
            body["tools"] = [_tool(tool) for tool in tools]
            body["tool_choice"] = _tool_choice(tool_choice)
        return body | sampling_fields(config)

    def output(self, completion: Json) -> ModelOutput:
        """Inspect's model output for a chat completion. An assistant message's id is the completion's."""
        usage: Json = completion.get("usage") or {}
        return ModelOutput(
            model=str(completion.get("model", "policy")),
            choices=[self._choice(choice, completion["id"]) for choice in completion["choices"]],
            usage=ModelUsage(
                input_tokens=usage.get("prompt_tokens", 0),
                output_tokens=usage.get("completion_tokens", 0),
                total_tokens=usage.get("total_tokens", 0),
            ),
        )

    def _message(self, message: ChatMessage) -> Json:
        if message.role == "assistant":
            return self._assistant(message)
        if message.role == "tool":
            text = f"Error: {message.error.message}" if message.error else _text(message.content)
            return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id or ""}
        return {"role": message.role, "content": _text(message.content)}

    def _assistant(self, message: ChatMessageAssistant) -> Json:
        content = message.content
        reasoning = ""
        if not isinstance(content, str):
            reasoning = "".join(part.reasoning for part in content if isinstance(part, ContentReasoning))
            content = [part for part in content if not isinstance(part, ContentReasoning)]
        sent: Json = {"role": "assistant", "content": _text(content)}
        if reasoning:
            sent["reasoning_content"] = reasoning
        if message.tool_calls:
            sent["tool_calls"] = [self._call(call) for call in message.tool_calls]
            sent["content"] = sent["content"] or None
        return sent

    def _call(self, call: ToolCall) -> Json:
        raw, parsed = self._arguments.get(call.id, ("", None))
        arguments = raw if parsed == call.arguments else json.dumps(call.arguments)
        return {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function, "arguments": arguments},
        }

    def _choice(self, choice: Json, completion_id: str) -> ChatCompletionChoice:
        message: Json = choice["message"]
        index = int(choice.get("index", 0))
        reply = ChatMessageAssistant(
            id=completion_id if index == 0 else f"{completion_id}-{index}",
            content=_content(message),
            tool_calls=[self._read_call(call) for call in message.get("tool_calls") or ()] or None,
            model="policy",
            source="generate",
        )
        logprobs = choice.get("logprobs")
        return ChatCompletionChoice(
            message=reply,
            stop_reason=_STOP_REASONS.get(choice.get("finish_reason") or "", "unknown"),
            logprobs=Logprobs.model_validate(logprobs) if logprobs else None,
        )

    def _read_call(self, call: Json) -> ToolCall:
        raw = str(call["function"].get("arguments") or "")
        arguments, problem = _parse_arguments(raw)
        self._arguments[call["id"]] = (raw, arguments)
        return ToolCall(
            id=call["id"], function=call["function"]["name"], arguments=arguments, parse_error=problem
        )


def sampling_fields(config: GenerateConfig) -> Json:
    """The request fields of a GenerateConfig. Raises ConversionError naming what cannot be honoured."""
    wanted = {name: getattr(config, name) for name in config.model_fields_set}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    refused = sorted(wanted.keys() - _SENT.keys() - _INSPECTS_OWN)
    if refused:
        raise ConversionError(
            f"the task's GenerateConfig sets {', '.join(refused)}: not possible for a policy"
        )
    return {_SENT[name]: value for name, value in wanted.items() if name in _SENT}


def _parse_arguments(raw: str) -> tuple[dict[str, Any], str | None]:
    try:
        arguments = json.loads(raw or "{}")
    except ValueError as error:
        return {}, f"the arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return {}, f"the arguments must be a JSON object, not {type(arguments).__name__}"
    return arguments, None


def _content(message: Json) -> str | list[Content]:
    text = message.get("content") or ""
    reasoning = message.get("reasoning_content")
    return [ContentReasoning(reasoning=reasoning), ContentText(text=text)] if reasoning else text


def _text(content: str | Sequence[Content]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part) for part in content)


def _part(part: Content) -> str:
    if isinstance(part, ContentText):
        return part.text
    raise ConversionError(f"the task's messages hold {part.type} content; the policy reads text alone")


def _tool(tool: ToolInfo) -> Json:
    parameters = tool.parameters.model_dump(exclude_none=True)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | Json:
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice
