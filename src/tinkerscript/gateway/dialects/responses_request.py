"""OpenAI Responses: requests for a response and for the token count of its prompt.

`previous_response_id` continues a response of the same claim. Outside episodes, a model keeps the latest
responses unless `store` is false.

A response's items, sent back, become the one sampled message. Consecutive items belong to one message while
they keep a reply's order (reasoning, text, calls) and no id contradicts it.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

import base64
import binascii
import re
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
    TopLogprobs,
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
from tinkerscript.limits import MESSAGES, TOOLS

RESPONSE_PREFIX = "resp_"
Parts = str | list[dict[str, Any]]

_OUR_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_\d+)?")

_ORDER = ("reasoning", "message", "function_call")

_Status = Literal["in_progress", "completed", "incomplete"]


class _Item(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str = ""
    type: str = ""
    status: _Status = "completed"


class _Message(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Annotated[Any, Unsupported()] = None


class _FunctionCall(_Item):
    call_id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    arguments: str
    namespace: str | None = None
    caller: Annotated[Any, Unsupported(DIRECT)] = None
    async_: Annotated[Any, Unsupported(False)] = msgspec.field(default=None, name="async")


class _FunctionCallOutput(_Item):
    call_id: Annotated[str, Meta(min_length=1)]
    output: Parts
    name: str | None = None
    namespace: str | None = None
    caller: Annotated[Any, Unsupported(DIRECT)] = None


class _ReasoningText(Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["reasoning_text", "summary_text"]


class _Reasoning(_Item):
    summary: list[_ReasoningText] = []
    content: list[_ReasoningText] = []
    encrypted_content: str = ""


class _Text(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str
    annotations: Annotated[Any, Unsupported([])] = None
    # Accepted and ignored.
    logprobs: list[Any] = []
    prompt_cache_breakpoint: dict[str, Any] | None = None


class _Namespace(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["namespace"]
    name: Annotated[str, Meta(min_length=1)]
    description: str = ""
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class _FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # Arguments stay as the model sampled them.
    strict: bool = False
    allowed_callers: Annotated[Any, Unsupported(["direct"])] = None
    defer_loading: Annotated[Any, Unsupported(False)] = None
    output_schema: Annotated[Any, Unsupported()] = None
    async_: Annotated[Any, Unsupported(False)] = msgspec.field(default=None, name="async")


def normalized_messages(items: str | list[dict[str, Any]], instructions: str | None) -> list[ChatMessage]:
    conversation = _Conversation()
    if instructions:
        # A response that continues this one drops the message.
        conversation.messages.append({"role": "system", "content": instructions, "instructions": True})
    if isinstance(items, str):
        conversation.messages.append({"role": "user", "content": items})
        return conversation.messages
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    return conversation.messages


def encrypt(reasoning: str) -> str:
    return base64.b64encode(reasoning.encode()).decode()


def normalized_tools(tools: Iterable[dict[str, Any]]) -> list[Tool]:
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") == "namespace":
            found += _tools_of(convert(tool, _Namespace, where), where)
        else:
            found.append(_tool(tool, where))
    return found


def namespaces_of(tools: Iterable[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    return {
        namespaced(space["name"], tool["name"]): (space["name"], tool["name"])
        for space in tools
        if space.get("type") == "namespace"
        for tool in space["tools"]
    }


def namespaced(namespace: str, name: str) -> str:
    return f"{namespace.removesuffix('__')}__{name}"


def _tools_of(space: _Namespace, where: str) -> Iterable[Tool]:
    for index, inner in enumerate(space.tools):
        function = _tool(inner, f"{where}.tools[{index}]")["function"]
        described = [text for text in (space.description, function.get("description")) if text]
        name = namespaced(space.name, function["name"])
        yield function_tool(name, "\n\n".join(described) or None, function.get("parameters"))


class _Conversation:
    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._reply: ChatMessage | None = None
        self._last: str = ""

    def add(self, item: dict[str, Any], where: str) -> None:
        match _type_of(item, where):
            case "message" if item.get("role") != "assistant":
                self.messages.append(_message(convert(item, _Message, where), where))
            case "message":
                message = convert(item, _Message, where)
                self._message_of("message", message.id)["content"] += _message(message, where)["content"]
            case "reasoning":
                self._add_reasoning(convert(item, _Reasoning, where), where)
            case "function_call":
                call = convert(item, _FunctionCall, where)
                reply = self._message_of("function_call", call.id)
                reply.setdefault("tool_calls", []).append(_tool_call(call))
            case _:
                output = convert(item, _FunctionCallOutput, where)
                text = _text(output.output, f"{where}.output")
                self.messages.append({"role": "tool", "content": text, "tool_call_id": output.call_id})

    def _add_reasoning(self, item: _Reasoning, where: str) -> None:
        reply = self._message_of("reasoning", item.id)
        texts = [part.text for part in item.content]
        if not texts and item.encrypted_content:
            texts = [_decrypt(item.encrypted_content, f"{where}.encrypted_content")]
        if text := "".join(texts or [part.text for part in item.summary]):
            reply["reasoning_content"] = reply.get("reasoning_content", "") + text

    def _message_of(self, kind: str, item_id: str) -> ChatMessage:
        ours = _OUR_ID.fullmatch(item_id)
        call_id = ours[1] if ours else None
        if self._reply is None or not self._continues(self._reply, kind, call_id):
            self._reply = {"role": "assistant", "content": ""}
            self.messages.append(self._reply)
        if call_id:
            self._reply["id"] = call_id
        self._last = kind
        return self._reply

    def _continues(self, reply: ChatMessage, kind: str, call_id: str | None) -> bool:
        known = reply.get("id")
        if known and call_id:
            return known == call_id
        if self.messages[-1] is not reply:
            return False
        if kind == self._last:
            return kind == "function_call"
        return _ORDER.index(kind) > _ORDER.index(self._last)


def _type_of(item: dict[str, Any], where: str) -> str:
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind in (*_ORDER, "function_call_output"):
        return kind
    if kind == "item_reference":
        remedy = "send the item itself, or continue from a response with previous_response_id"
        raise unsupported(f"{where}.type", kind, remedy)
    message = f"items of the type {kind!r} are not supported; use messages, function calls and their outputs"
    raise GatewayError(400, "unsupported_content", message, param=f"{where}.type")


def _message(message: _Message, where: str) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _text(message.content, f"{where}.content")}


def _tool_call(call: _FunctionCall) -> dict[str, Any]:
    name = namespaced(call.namespace, call.name) if call.namespace else call.name
    function = {"name": name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _text(content: Parts, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if part.get("type") not in ("input_text", "output_text", "text"):
            raise unsupported_content(part.get("type"), at)
        texts.append(convert(part, _Text, at).text)
    return "".join(texts)


def _decrypt(text: str, where: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        message = "this encrypted_content is not from this server; leave the reasoning item out"
        raise invalid(where, message) from error


def _tool(tool: dict[str, Any], where: str) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise unsupported(f"{where}.type", kind, "only functions that your program runs are supported")
    definition = convert(tool, _FunctionTool, where)
    return function_tool(definition.name, definition.description, definition.parameters)


_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"


class ResponsesCall(ModelCall, frozen=True, kw_only=True):
    FIELD_NAMES: ClassVar[Mapping[str, str]] = {**ModelCall.FIELD_NAMES, "json_schema": "text.format"}

    echo: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    namespaces: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict[str, tuple[str, str]])
    encrypted_reasoning: bool = False  # Repeats it in `encrypted_content`.


class _Format(Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class _TextSettings(Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    verbosity: None = None


class _ReasoningSettings(Struct, forbid_unknown_fields=True):
    context: None = None
    effort: None = None
    generate_summary: None = None
    mode: None = None
    summary: None = None


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class _Prompt(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MESSAGES.limit)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS.limit)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _ReasoningSettings | None = None
    text: _TextSettings | None = None
    conversation: Annotated[Any, Unsupported()] = None
    truncation: Annotated[Any, Unsupported("disabled")] = None


class _Request(_Prompt, kw_only=True):
    include: list[str] | None = None
    max_output_tokens: MaxTokens | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    top_logprobs: TopLogprobs | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    store: bool | None = None
    # Accepted and ignored.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    access_programs: Annotated[Any, Unsupported()] = None
    background: Annotated[Any, Unsupported(False)] = None
    context_management: Annotated[Any, Unsupported([])] = None
    image: Annotated[Any, Unsupported()] = None
    max_tool_calls: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None


_PLAIN = {"type": "text"}

_REQUEST = msgspec.json.Decoder(_Request)
_PROMPT = msgspec.json.Decoder(_Prompt)


def parse_request(body: bytes) -> ResponsesCall:
    request = decode(_REQUEST, body)
    include, prompt = _include(request.include or ()), _prompt_arguments(request)
    return ResponsesCall(
        required_tools=_required_tools(request.tool_choice, prompt["tools"]),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        json_schema=_json_schema(request.text),
        max_tokens=request.max_output_tokens,
        logprobs=_LOGPROBS in include,
        top_logprobs=_top_logprobs(request.top_logprobs, include),
        store=request.store is not False,
        encrypted_reasoning=_ENCRYPTED in include,
        namespaces=namespaces_of(request.tools or ()),
        echo=_echo(request),
        **(prompt | sampling_arguments(request)),
    )


def parse_count(body: bytes) -> ResponsesCall:
    prompt = decode(_PROMPT, body)
    return ResponsesCall(**_prompt_arguments(prompt))


def _prompt_arguments(prompt: _Prompt) -> dict[str, Any]:
    return {
        "model": prompt.model,
        "previous": _previous(prompt.previous_response_id),
        "messages": normalized_messages(prompt.input, prompt.instructions),
        "tools": normalized_tools(prompt.tools or ()),
        "parse_tool_calls": bool(prompt.tools) and prompt.tool_choice != "none",
    }


def _include(requested: Iterable[str]) -> frozenset[str]:
    for each in requested:
        if each not in (_LOGPROBS, _ENCRYPTED):
            raise unsupported("include", each, f"use {_LOGPROBS!r} or {_ENCRYPTED!r}")
    return frozenset(requested)


def _previous(response_id: str | None) -> str | None:
    if response_id is not None and not response_id.startswith(RESPONSE_PREFIX):
        raise invalid("previous_response_id", f"{response_id!r} is not a response id, such as 'resp_1f...'")
    return response_id.removeprefix(RESPONSE_PREFIX) if response_id else None


def _required_tools(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> list[str]:
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return required_tools(None, tools)
    if isinstance(choice, dict):
        named = [choice] if choice.get("type") == "function" else None
        if choice.get("type") == "allowed_tools" and choice.get("mode") == "required":
            named = choice.get("tools")
        if isinstance(named, list) and all(_names_a_function(each) for each in named):
            return required_tools([each["name"] for each in named], tools)
    remedy = 'use "auto", "none", "required" or functions: {"type": "function", "name": NAME}'
    raise unsupported("tool_choice", choice, remedy)


def _names_a_function(choice: Any) -> bool:
    return (
        isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str)
    )


def _json_schema(text: _TextSettings | None) -> dict[str, Any] | None:
    wanted = text and text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.schema_ is None:
        raise invalid("text.format.schema", "text.format of the type 'json_schema' needs a schema")
    return wanted.schema_ or {"type": "object"}


def _top_logprobs(requested: int | None, include: frozenset[str]) -> int:
    if requested and _LOGPROBS not in include:
        raise invalid("top_logprobs", f"top_logprobs is only allowed with include=[{_LOGPROBS!r}]")
    return requested or 0


def _set_fields(value: Struct) -> dict[str, Any]:
    return {name: each for name, each in msgspec.to_builtins(value).items() if each is not None}


def _echo(request: _Request) -> dict[str, Any]:
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {
            "format": _set_fields(request.text.format) if request.text and request.text.format else _PLAIN
        },
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
