"""Input items and tools of OpenAI Responses, as normalized messages and tools.

Invariant: the items of a response, sent back as they came, become the one message that was sampled, with or
without its reasoning, and whether a call's output follows the call or all calls. Consecutive items belong to
one message as long as they come in the order of a reply (reasoning, text, calls) and no id says otherwise.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.dialects.validation import (
    convert,
    invalid,
    refuse_unsupported_fields,
    unsupported,
    unsupported_content,
)

RESPONSE_PREFIX = "resp_"
"""Precedes a call's id in the id of its response."""

Parts = str | list[dict[str, Any]]

_OUR_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_\d+)?")
"""Ids of our output items: the id of the call, and for a function call its number."""

_ORDER = ("reasoning", "message", "function_call")

_Status = Literal["in_progress", "completed", "incomplete"]
_DIRECT = {"type": "direct"}


class _Item(Struct, forbid_unknown_fields=True, kw_only=True):
    id: str = ""
    type: str = ""
    status: _Status = "completed"


class _Message(_Item):
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: str | None = None


class _FunctionCall(_Item):
    call_id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None
    async_: bool = msgspec.field(default=False, name="async")


class _FunctionCallOutput(_Item):
    call_id: Annotated[str, Meta(min_length=1)]
    output: Parts
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = None


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
    annotations: list[Any] = []
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
    # Accepted and not enforced: arguments are what the model sampled.
    strict: bool = False
    # Known and not supported: see _TOOL_NO_OPS.
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None
    async_: Any = msgspec.field(default=None, name="async")


_TOOL_NO_OPS: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "output_schema": (),
    "async_": (False,),
}
_CALL_NO_OPS: dict[str, tuple[Any, ...]] = {"caller": (_DIRECT,), "async_": (False,)}
_OUTPUT_NO_OPS: dict[str, tuple[Any, ...]] = {"caller": (_DIRECT,)}


def normalized_messages(items: str | list[dict[str, Any]], instructions: str | None) -> list[ChatMessage]:
    """The conversation as normalized messages. Raises GatewayError 400 for content that is not supported.

    The message made from `instructions` is marked: a response that continues from this one drops it.
    """
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions, "instructions": True})
    if isinstance(items, str):
        conversation.messages.append({"role": "user", "content": items})
        return conversation.messages
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index}]")
    return conversation.messages


def encrypt(reasoning: str) -> str:
    """The value of `encrypted_content`: the reasoning in base64, so that the server has nothing to keep."""
    return base64.b64encode(reasoning.encode()).decode()


def normalized_tools(tools: Iterable[dict[str, Any]]) -> list[Tool]:
    """Function tools, normalized, also those in a namespace. Raises GatewayError 400 for a tool that OpenAI's
    servers would run.
    """
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") == "namespace":
            found += _tools_of(convert(tool, _Namespace, where), where)
        else:
            found.append(_tool(tool, where))
    return found


def namespaces_of(tools: Iterable[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """The name that the model sees of each tool in a namespace -> namespace and name. `tools` are valid."""
    return {
        namespaced(space["name"], tool["name"]): (space["name"], tool["name"])
        for space in tools
        if space.get("type") == "namespace"
        for tool in space["tools"]
    }


def namespaced(namespace: str, name: str) -> str:
    """What the model sees as the name of a tool: `web__open` for `open` in `web`, or in `web__`."""
    return f"{namespace.removesuffix('__')}__{name}"


def _tools_of(space: _Namespace, where: str) -> Iterable[Tool]:
    """The tools of a namespace; its description precedes that of each."""
    for index, inner in enumerate(space.tools):
        function = _tool(inner, f"{where}.tools[{index}]")["function"]
        described = [text for text in (space.description, function.get("description")) if text]
        named = {**function, "name": namespaced(space.name, function["name"])}
        yield {
            "type": "function",
            "function": named | ({"description": "\n\n".join(described)} if described else {}),
        }


class _Conversation:
    """The messages so far, and the assistant message that further items may belong to."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._reply: ChatMessage | None = None
        """The last assistant message."""

        self._last: str = ""
        """Type of the item last added to it."""

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
                refuse_unsupported_fields(call, _CALL_NO_OPS, where)
                reply = self._message_of("function_call", call.id)
                reply.setdefault("tool_calls", []).append(_tool_call(call))
            case _:
                output = convert(item, _FunctionCallOutput, where)
                refuse_unsupported_fields(output, _OUTPUT_NO_OPS, where)
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
        """The assistant message that an item belongs to."""
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
    """The type of an item. Raises GatewayError 400 for a type that is not supported."""
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind in (*_ORDER, "function_call_output"):
        return kind
    if kind == "item_reference":
        remedy = "send the item itself, or continue from a response with previous_response_id"
        raise unsupported(f"{where}.type", kind, remedy)
    message = f"items of the type {kind!r} are not supported; use messages, function calls and their outputs"
    raise GatewayError(400, "unsupported_content", message, param=f"{where}.type")


def _message(message: _Message, where: str) -> ChatMessage:
    if message.phase is not None:
        raise unsupported(f"{where}.phase", message.phase)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _text(message.content, f"{where}.content")}


def _tool_call(call: _FunctionCall) -> dict[str, Any]:
    name = namespaced(call.namespace, call.name) if call.namespace else call.name
    function = {"name": name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _text(content: Parts, where: str) -> str:
    """The text of a content: its parts, concatenated."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if part.get("type") not in ("input_text", "output_text", "text"):
            raise unsupported_content(part.get("type"), at)
        text = convert(part, _Text, at)
        if text.annotations:
            raise unsupported(f"{at}.annotations", text.annotations)
        texts.append(text.text)
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
    refuse_unsupported_fields(definition, _TOOL_NO_OPS, where)
    function: dict[str, Any] = {"name": definition.name}
    if definition.description is not None:
        function["description"] = definition.description
    if definition.parameters is not None:
        function["parameters"] = definition.parameters
    return {"type": "function", "function": function}
