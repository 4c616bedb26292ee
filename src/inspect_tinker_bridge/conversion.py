"""Inspect's samples and messages as JSON, and back; messages in the form of OpenAI's chat.

`sample_to_json` and `sample_from_json` convert samples. `to_dicts` and `from_dicts` convert conversations
that are stored (datasets, logs, recorded calls). `ChatConverter` converts the live model calls of one
episode: requests out, completions in.

Invariants: `sample_from_json(sample_to_json(sample))` equals the sample, including its id's type, its None
values and its sandbox, which pydantic's own round trip loses. Text, reasoning and tool arguments survive to
the character; what cannot be expressed raises ConversionError and is never dropped. Each conversion takes
microseconds: Inspect's own converters take about a millisecond each way, a large part of a short episode's
CPU time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolCallError, ToolChoice, ToolFunction, ToolInfo
from inspect_ai.util import SandboxEnvironmentSpec
from pydantic_core import from_json, to_json

from inspect_tinker_bridge.errors import ConversionError

__all__ = [
    "ChatConverter",
    "MessageDict",
    "from_dicts",
    "sample_from_json",
    "sample_of_row",
    "sample_to_json",
    "sampling_fields",
    "to_dicts",
]

MessageDict: TypeAlias = dict[str, Any]
"""`role` and `content` (text), plus `tool_calls` (arguments as JSON text), `tool_call_id`, `name`,
`reasoning_content` and `error` where they apply."""

Json: TypeAlias = dict[str, Any]

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
"""GenerateConfig field -> OpenAI name, for the fields a request carries. The server refuses what it does not
support."""

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
"""GenerateConfig fields that Inspect applies itself or that configure its own connections."""

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "stop",
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """The sample as JSON values, unset fields left out. Metadata that JSON cannot hold becomes its `repr`."""
    held: dict[str, Any] = from_json(to_json(sample, fallback=repr))
    return {name: value for name, value in held.items() if value is not None}


def sample_from_json(held: Mapping[str, Any]) -> Sample:
    """Restore a sample. Raises pydantic's ValidationError, or TypeError if there is no input."""
    fields = dict(held)
    sandbox = fields.pop("sandbox", None)
    sample = Sample.model_validate(fields)
    if sandbox is not None:
        sample.sandbox = SandboxEnvironmentSpec.model_validate(sandbox)
    return sample


def sample_of_row(row: Mapping[str, Any] | str) -> Sample:
    """Restore the sample of an `inspect_dataset_to_hf` row, or of its `info`. Raises ConversionError."""
    info: Any = row if isinstance(row, str) else row.get("info", row)
    held = json.loads(info) if isinstance(info, str) else info
    if not isinstance(held, Mapping) or "sample" not in held:
        raise ConversionError("the info holds no sample; pass a row of inspect_dataset_to_hf")
    return sample_from_json(held["sample"])


def to_dicts(messages: Sequence[ChatMessage]) -> list[MessageDict]:
    """Convert Inspect messages for storage.

    Raises ConversionError for content other than text and reasoning, such as images.
    """
    return [_to_dict(message) for message in messages]


def from_dicts(conversation: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Convert stored messages to Inspect messages.

    Tool arguments that are not a JSON object become `{"raw_text": ...}` with a `parse_error`. Raises
    ConversionError for an unknown role.
    """
    return [_from_dict(message) for message in conversation]


class ChatConverter:
    """Converts the model calls of one episode.

    It remembers the arguments of each tool call as the server sent them, so that the next request repeats
    them to the character and the server recognizes its own reply.
    """

    def __init__(self) -> None:
        self._arguments: dict[str, tuple[str, dict[str, Any]]] = {}
        """Tool call id -> (arguments as sent, arguments as parsed)."""

    def request(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> Json:
        """Build the body of a chat completions request.

        Raises ConversionError naming what it cannot carry.
        """
        body: Json = {"model": "policy", "messages": [self._message(message) for message in messages]}
        if tools:
            body["tools"] = [_tool(tool) for tool in tools]
            body["tool_choice"] = _tool_choice(tool_choice)
        return body | sampling_fields(config)

    def output(self, completion: Json) -> ModelOutput:
        """Convert a chat completion. Assistant messages get the completion's id."""
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
            text = f"Error: {message.error.message}" if message.error else _text_only(message.content)
            return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id or ""}
        return {"role": message.role, "content": _text_only(message.content)}

    def _assistant(self, message: ChatMessageAssistant) -> Json:
        sent = _base_dict(message)
        if message.tool_calls:
            sent["tool_calls"] = [
                _function_call(call, self._sent_arguments(call)) for call in message.tool_calls
            ]
            sent["content"] = sent["content"] or None
        return sent

    def _sent_arguments(self, call: ToolCall) -> str:
        raw, parsed = self._arguments.get(call.id, ("", None))
        return raw if parsed == call.arguments else json.dumps(call.arguments)

    def _choice(self, choice: Json, completion_id: str) -> ChatCompletionChoice:
        message: Json = choice["message"]
        index = int(choice.get("index", 0))
        reply = ChatMessageAssistant(
            id=completion_id if index == 0 else f"{completion_id}-{index}",
            content=_assistant_content(message),
            tool_calls=[self._tool_call(call) for call in message.get("tool_calls") or ()] or None,
            model="policy",
            source="generate",
        )
        logprobs = choice.get("logprobs")
        return ChatCompletionChoice(
            message=reply,
            stop_reason=_STOP_REASONS.get(choice.get("finish_reason") or "", "unknown"),
            logprobs=Logprobs.model_validate(logprobs) if logprobs else None,
        )

    def _tool_call(self, call: Json) -> ToolCall:
        raw = str(call["function"].get("arguments") or "")
        arguments, problem = _parse_arguments(raw)
        self._arguments[call["id"]] = (raw, arguments)
        return ToolCall(
            id=call["id"], function=call["function"]["name"], arguments=arguments, parse_error=problem
        )


def sampling_fields(config: GenerateConfig) -> Json:
    """The request fields of a GenerateConfig. Raises ConversionError naming those a request cannot carry."""
    wanted = {name: getattr(config, name) for name in config.model_fields_set}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    refused = sorted(wanted.keys() - _SENT.keys() - _INSPECTS_OWN)
    if refused:
        raise ConversionError(
            f"the task's GenerateConfig sets {', '.join(refused)}, which a policy does not support; unset it"
        )
    return {_SENT[name]: value for name, value in wanted.items() if name in _SENT}


def _to_dict(message: ChatMessage) -> MessageDict:
    stored = _base_dict(message)
    if message.role == "assistant" and message.tool_calls:
        stored["tool_calls"] = [
            _function_call(call, json.dumps(call.arguments))
            | ({"parse_error": call.parse_error} if call.parse_error else {})
            for call in message.tool_calls
        ]
    if message.role == "tool":
        stored |= {"tool_call_id": message.tool_call_id or "", "name": message.function or ""}
        if message.error is not None:
            stored["error"] = {"type": message.error.type, "message": message.error.message}
    return stored


def _base_dict(message: ChatMessage) -> MessageDict:
    """Role, text and reasoning."""
    text, reasoning = _texts(message.content)
    converted: MessageDict = {"role": message.role, "content": text}
    return converted | ({"reasoning_content": reasoning} if reasoning else {})


def _texts(content: str | Sequence[Content]) -> tuple[str, str]:
    """Text and reasoning."""
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
                f"the conversation has {part.type} content; only text and reasoning are supported"
            )
    return text, reasoning


def _text_only(content: str | Sequence[Content]) -> str:
    text, reasoning = _texts(content)
    if reasoning:
        raise ConversionError("the conversation has reasoning content outside an assistant message")
    return text


def _function_call(call: ToolCall, arguments: str) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": arguments}}


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
        raise ConversionError(f"a message has the role {role!r}; use system, user, assistant or tool")
    calls = [_stored_tool_call(call) for call in message.get("tool_calls") or ()]
    return ChatMessageAssistant(content=_assistant_content(message), tool_calls=calls or None)


def _stored_tool_call(call: Mapping[str, Any]) -> ToolCall:
    raw = call["function"]["arguments"]
    arguments, problem = _parse_arguments(raw) if isinstance(raw, str) else (dict(raw), None)
    return ToolCall(
        id=call.get("id") or "",
        function=call["function"]["name"],
        arguments={"raw_text": raw} if problem else arguments,
        parse_error=problem or call.get("parse_error"),
    )


def _assistant_content(message: Mapping[str, Any]) -> str | list[Content]:
    text = message.get("content") or ""
    reasoning = message.get("reasoning_content")
    return [ContentReasoning(reasoning=reasoning), ContentText(text=text)] if reasoning else text


def _parse_arguments(raw: str) -> tuple[dict[str, Any], str | None]:
    """The parsed arguments, and what is wrong with them."""
    try:
        arguments = json.loads(raw or "{}")
    except ValueError as error:
        return {}, f"the arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return {}, f"the arguments must be a JSON object, not {type(arguments).__name__}"
    return arguments, None


def _tool(tool: ToolInfo) -> Json:
    parameters = tool.parameters.model_dump(exclude_none=True)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | Json:
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice
