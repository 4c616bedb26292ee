"""Convert Inspect's samples to and from JSON, and messages to and from OpenAI's chat format.

`sample_from_json(sample_to_json(sample))` equals the sample, with its id's type, its None values and its
sandbox, which pydantic loses. Text, reasoning and tool arguments survive to the character; anything else
raises UnsupportedError. Our conversions take microseconds; Inspect's take a millisecond.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, TypeAlias
from uuid import UUID

from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    Content,
    ContentImage,
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
from pydantic import BaseModel
from pydantic_core import from_json, to_json

from inspect_tinker_bridge.errors import UnsupportedError

__all__ = [
    "ChatConverter",
    "MessageDict",
    "check_for_tinker",
    "from_dicts",
    "parse_arguments",
    "sample_digest",
    "sample_from_json",
    "sample_of_row",
    "sample_summary",
    "sample_to_json",
    "sampling_fields",
    "text_of",
    "to_dicts",
    "tool_call",
    "unapplied",
]

MessageDict: TypeAlias = dict[str, Any]
"""A message with `role`, `content` and, where they apply, `tool_calls` (arguments as JSON text),
`tool_call_id`, `name`, `reasoning_content` and `error`.

`content` is text, or with images, a list of `text` and `image_url` parts.
"""

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

# Inspect applies these itself.
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
    "extra_headers",
}

_INSPECTS_OWN_AT_HAND = {"cache", "cache_prompt", "batch", "fail_on_refusal", "reasoning_history"}

# In a Tinker environment the trainer decides these.
_TUNING = {
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "parallel_tool_calls",
    "verbosity",
    "effort",
    "reasoning_effort",
    "reasoning_mode",
    "reasoning_tokens",
    "reasoning_summary",
}

LEFT_OUT = _TUNING - _SENT.keys()  # No request carries these.
_LEFT_OUT = LEFT_OUT | _INSPECTS_OWN_AT_HAND

# pydantic, which writes logs, allows about 250.
_MAX_DEPTH = 100

# About 1,000 digits; Python writes at most 4,300.
_MAX_BITS = 3400

_SURROGATE = re.compile("[\ud800-\udfff]")

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "stop",
    "length": "max_tokens",
    "tool_calls": "tool_calls",
    "content_filter": "content_filter",
}


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """Omits unset fields. Unknown metadata becomes its `repr`."""
    held: dict[str, Any] = from_json(to_json(sample, fallback=repr))
    return {name: value for name, value in held.items() if value is not None}


def sample_from_json(held: Mapping[str, Any]) -> Sample:
    """Raises pydantic's ValidationError, or TypeError without input."""
    fields = dict(held)
    sandbox = fields.pop("sandbox", None)
    sample = Sample.model_validate(fields)
    if sandbox is not None:
        sample.sandbox = SandboxEnvironmentSpec.model_validate(sandbox)
    return sample


def sample_digest(sample: Sample) -> str:
    """A digest of the problem, equal on all machines.

    It ignores the id. It hashes only the last part of an absolute path, and only the type of an object of
    unknown type.
    """
    problem = (sample.input, sample.choices, sample.target, sample.metadata)
    return hashlib.sha256(repr(_settled(problem)).encode()).hexdigest()[:32]


def sample_summary(sample: Sample) -> dict[str, Any]:
    held = {
        "id": sample.id,
        "input": sample.input,
        "choices": sample.choices,
        "target": sample.target,
        "metadata": sample.metadata,
        "digest": sample_digest(sample),
    }
    told: dict[str, Any] = from_json(to_json(_showable(held), fallback=repr, inf_nan_mode="strings"))
    return {name: value for name, value in told.items() if value is not None}


def _showable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode() if _SURROGATE.search(value) else value
    if isinstance(value, dict):
        return {_showable(key): _showable(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_showable(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _settled(value: Any) -> Any:
    # The `repr` must be the same in every process.
    if value is None or isinstance(value, bool | int | bytes):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str | PurePath):
        text = str(value)
        return ascii(PurePath(text).name if text.startswith("/") else text)
    kind = type(value).__name__
    if isinstance(value, BaseModel):  # Inspect draws new ids for messages each time.
        fields = {name: getattr(value, name) for name in type(value).model_fields if name != "id"}
        return kind, _settled(fields)
    if isinstance(value, Mapping):
        pairs: list[tuple[Any, Any]] = [(_settled(key), _settled(item)) for key, item in value.items()]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        return sorted(pairs, key=repr)
    if isinstance(value, set | frozenset):
        return kind, sorted((_settled(item) for item in value), key=repr)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return kind, [_settled(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, date | time | timedelta | Enum | Decimal | UUID):
        return kind, str(value)
    return kind


def sample_of_row(row: Mapping[str, Any] | str) -> Sample:
    """Takes an `inspect_dataset_to_hf` row or its `info`."""
    info: Any = row if isinstance(row, str) else row.get("info", row)
    held = json.loads(info) if isinstance(info, str) else info
    if not isinstance(held, Mapping) or "sample" not in held:
        raise UnsupportedError("the info holds no sample; pass a row of inspect_dataset_to_hf")
    return sample_from_json(held["sample"])


def to_dicts(messages: Sequence[ChatMessage]) -> list[MessageDict]:
    """Raises UnsupportedError for content other than text, reasoning and images."""
    return [_to_dict(message) for message in messages]


def from_dicts(conversation: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Raises UnsupportedError for an unknown role.

    Tool arguments that are not a JSON object become `{"raw_text": ...}` with a `parse_error`.
    """
    return [_from_dict(message) for message in conversation]


class ChatConverter:
    """Converts the model calls of one episode.

    It repeats tool arguments as the server sent them, so that the server recognizes its reply.
    """

    def __init__(self) -> None:
        self._arguments: dict[str, tuple[str, dict[str, Any]]] = {}

    def request(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> Json:
        """Raises UnsupportedError, which names the field."""
        body: Json = {"model": "policy", "messages": [self._message(message) for message in messages]}
        if tools:
            body["tools"] = [_tool(tool) for tool in tools]
            body["tool_choice"] = _tool_choice(tool_choice)
        return body | sampling_fields(config)

    def output(self, completion: Json) -> ModelOutput:
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
        if message.role == "user":
            return {"role": "user", "content": _content_of(message)}
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
        arguments, problem = parse_arguments(raw)
        self._arguments[call["id"]] = (raw, arguments)
        return tool_call(call["id"], call["function"]["name"], arguments, problem)


def sampling_fields(config: GenerateConfig) -> Json:
    wanted = _wanted(config)
    _refuse(wanted.keys() - _SENT.keys() - {"response_schema"} - _LEFT_OUT - _INSPECTS_OWN)
    fields = {_SENT[name]: value for name, value in wanted.items() if name in _SENT}
    if config.response_schema is not None:
        schema = config.response_schema.model_dump(exclude_none=True)
        schema["schema"] = schema.pop("json_schema")
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def unapplied(config: GenerateConfig) -> list[str]:
    """Set fields that no request carries, as `name=value`."""
    wanted = _wanted(config)
    return [f"{name}={wanted[name]!r}" for name in sorted(wanted) if name in LEFT_OUT]


def check_for_tinker(config: GenerateConfig, *, applied: Collection[str] = ()) -> list[str]:
    """Return the set fields that the trainer decides, except `applied` ones, as `name=value`.

    Raises UnsupportedError for fields that a trainer cannot honor, such as several choices or logprobs.
    """
    wanted = _wanted(config)
    one = {"num_choices": 1, "best_of": 1, "logprobs": False}
    wanted = {name: value for name, value in wanted.items() if one.get(name) != value}
    _refuse(wanted.keys() - {"stop_seqs"} - _TUNING - _INSPECTS_OWN - _INSPECTS_OWN_AT_HAND, wanted)
    return [f"{name}={value!r}" for name, value in sorted(wanted.items()) if name in _TUNING - set(applied)]


def _wanted(config: GenerateConfig) -> Json:
    wanted = {name: getattr(config, name) for name in config.model_fields_set}
    return {name: value for name, value in wanted.items() if value is not None}


def _refuse(fields: set[str], values: Mapping[str, Any] | None = None) -> None:
    if fields:
        named = [f"{name}={values[name]!r}" if values else name for name in sorted(fields)]
        raise UnsupportedError(
            f"the task's GenerateConfig sets {', '.join(named)}, which a policy does not support; unset it"
        )


def text_of(message: MessageDict) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def _to_dict(message: ChatMessage) -> MessageDict:
    stored = _base_dict(message, images=True)
    if _has_images(message):
        stored["content"] = _parts(message)
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


def _content_of(message: ChatMessage) -> str | list[dict[str, Any]]:
    text = _text_only(message.content, images=True)
    return _parts(message) if _has_images(message) else text


def _has_images(message: ChatMessage) -> bool:
    return not isinstance(message.content, str) and any(part.type == "image" for part in message.content)


def _parts(message: ChatMessage) -> list[dict[str, Any]]:
    return [_stored_part(part) for part in message.content if not isinstance(part, ContentReasoning | str)]


def _stored_part(part: Content) -> dict[str, Any]:
    if isinstance(part, ContentImage):
        return {"type": "image_url", "image_url": {"url": part.image, "detail": part.detail}}
    return {"type": "text", "text": part.text if isinstance(part, ContentText) else ""}


def _base_dict(message: ChatMessage, *, images: bool = False) -> MessageDict:
    text, reasoning = _texts(message.content, images=images)
    converted: MessageDict = {"role": message.role, "content": text}
    return converted | ({"reasoning_content": reasoning} if reasoning else {})


def _texts(content: str | Sequence[Content], *, images: bool = False) -> tuple[str, str]:
    if isinstance(content, str):
        return content, ""
    text, reasoning = "", ""
    for part in content:
        if isinstance(part, ContentText):
            text += part.text
        elif isinstance(part, ContentReasoning):
            reasoning += part.reasoning
        elif not (images and isinstance(part, ContentImage)):
            carried = "text, reasoning and images" if images else "text and reasoning"
            raise UnsupportedError(f"the conversation has {part.type} content; only {carried} are supported")
    return text, reasoning


def _text_only(content: str | Sequence[Content], *, images: bool = False) -> str:
    text, reasoning = _texts(content, images=images)
    if reasoning:
        raise UnsupportedError("the conversation has reasoning content outside an assistant message")
    return text


def _function_call(call: ToolCall, arguments: str) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": arguments}}


def _from_dict(message: Mapping[str, Any]) -> ChatMessage:
    role, content = message["role"], _stored_content(message.get("content") or "")
    if role == "system":
        return ChatMessageSystem(content=content)
    if role == "user":
        return ChatMessageUser(content=content)
    if role == "tool":
        error = message.get("error")
        return ChatMessageTool(
            content=content,
            tool_call_id=message.get("tool_call_id"),
            function=message.get("name"),
            error=ToolCallError(error["type"], error["message"]) if error else None,
        )
    if role != "assistant":
        raise UnsupportedError(f"a message has the role {role!r}; use system, user, assistant or tool")
    calls = [_stored_tool_call(call) for call in message.get("tool_calls") or ()]
    said = _assistant_content({**message, "content": content})
    return ChatMessageAssistant(content=said, tool_calls=calls or None)


def _stored_content(content: str | Sequence[Mapping[str, Any]]) -> str | list[Content]:
    if isinstance(content, str):
        return content
    converted: list[Content] = []
    for part in content:
        if part["type"] == "text":
            converted.append(ContentText(text=part["text"]))
        elif part["type"] == "image_url":
            image = part["image_url"]
            converted.append(ContentImage(image=image["url"], detail=image.get("detail", "auto")))
        else:
            raise UnsupportedError(f"a stored message has a {part['type']!r} part; use text and image_url")
    return converted


def _stored_tool_call(call: Mapping[str, Any]) -> ToolCall:
    raw = call["function"]["arguments"]
    arguments, problem = parse_arguments(raw) if isinstance(raw, str) else (dict(raw), None)
    return ToolCall(
        id=call.get("id") or "",
        function=call["function"]["name"],
        arguments={"raw_text": raw} if problem else arguments,
        parse_error=problem or call.get("parse_error"),
    )


def _assistant_content(message: Mapping[str, Any]) -> str | list[Content]:
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return content
    said = [ContentText(text=content)] if isinstance(content, str) else content
    return [ContentReasoning(reasoning=reasoning), *said]


def parse_arguments(raw: str) -> tuple[dict[str, Any], str | None]:
    """Parse a sampled call's arguments, and describe any problem. Never raises.

    Tools, sandboxes or logs refuse lone surrogates, NUL characters, nesting above 100, and integers of
    thousands of digits.
    """
    try:
        arguments = json.loads(raw or "{}")
    except ValueError as error:
        return {}, f"the arguments are not valid JSON: {error}"
    except RecursionError:
        return {}, "the arguments are nested too deep"
    if not isinstance(arguments, dict):
        return {}, f"the arguments must be a JSON object, not {type(arguments).__name__}"
    problem = _unusable(arguments)
    return ({}, f"the arguments {problem}") if problem else (arguments, None)


def tool_call(call_id: str, name: str, arguments: dict[str, Any], problem: str | None) -> ToolCall:
    """`problem` is about the arguments; the name may be invalid too."""
    if (unusable := _unusable_text(name)) is not None:
        name = name.encode("ascii", "backslashreplace").decode().replace("\0", "\\0")
        problem = f"the tool's name, {name}, {unusable.replace('have', 'has', 1)}"
    return ToolCall(id=call_id, function=name, arguments=arguments, parse_error=problem)


def _unusable_text(text: str) -> str | None:
    if "\0" in text:
        return "have a NUL character"
    if not text.isascii() and _SURROGATE.search(text):
        return "have a lone surrogate, which is half a character"
    return None


def _unusable(arguments: dict[str, Any]) -> str | None:
    level: list[Any] = [arguments]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            for item in [*value, *value.values()] if isinstance(value, dict) else value:
                if isinstance(item, str) and (problem := _unusable_text(item)):
                    return problem
                if isinstance(item, int) and item.bit_length() > _MAX_BITS:
                    return "have an integer of more than 1,000 digits"
                if isinstance(item, dict | list):
                    below.append(item)
        if not below:
            return None
        level = below
    return f"are nested more than {_MAX_DEPTH} deep"


def _tool(tool: ToolInfo) -> Json:
    parameters = tool.parameters.model_dump(exclude_none=True)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | Json:
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice
