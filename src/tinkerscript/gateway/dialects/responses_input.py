"""Items and tools of OpenAI Responses in the gateway's form.

Invariant: the items of a response, sent back as they came, become the one message that was answered, whether
its reasoning is among them or not, and whether a call's output follows the call or all calls. Items in a row
belong to one message while their order is that of an answer (reasoning, text, calls) and no id says
otherwise.

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
from tinkerscript.gateway.dialects.base import (
    convert,
    invalid,
    refuse_unhonoured,
    unsupported,
    unsupported_content,
)

Parts = str | list[dict[str, Any]]

_OUR_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_\d+)?")
"""Ids of output items: the call that answered, and a number for each function call."""

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
    # Accepted, of no consequence here.
    logprobs: list[Any] = []
    prompt_cache_breakpoint: dict[str, Any] | None = None


class _FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    # Accepted and not enforced: arguments are what the model sampled.
    strict: bool = False
    # Known and not honoured: see _NEUTRAL_TOOL.
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None
    async_: Any = msgspec.field(default=None, name="async")


_NEUTRAL_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "output_schema": (),
    "async_": (False,),
}
_NEUTRAL_CALL: dict[str, tuple[Any, ...]] = {
    "namespace": (),
    "caller": (_DIRECT,),
    "async_": (False,),
}
_NEUTRAL_OUTPUT: dict[str, tuple[Any, ...]] = {"namespace": (), "caller": (_DIRECT,)}


def normalised(items: str | list[dict[str, Any]], instructions: str | None) -> list[ChatMessage]:
    """The conversation in the gateway's form. Raises GatewayError 400 for what it cannot hold.

    The message that `instructions` became says so: a later response that goes on from this one leaves it out.
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


def encrypted(reasoning: str) -> str:
    """The value of `encrypted_content`: the reasoning in base64, so that nothing need be kept for it."""
    return base64.b64encode(reasoning.encode()).decode()


def neutral_tools(tools: Iterable[dict[str, Any]]) -> list[Tool]:
    """Tools in the gateway's form. Raises GatewayError 400 for a tool that OpenAI's servers would run."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


class _Conversation:
    """Messages as items arrive, and which answer is open for more of its own."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._answer: ChatMessage | None = None
        """The last assistant message."""

        self._last: str = ""
        """Type of the item that was last added to it."""

    def add(self, item: dict[str, Any], where: str) -> None:
        match _type_of(item, where):
            case "message" if item.get("role") != "assistant":
                self.messages.append(_message(convert(item, _Message, where), where))
            case "message":
                said = convert(item, _Message, where)
                self._reply_to("message", said.id)["content"] += _message(said, where)["content"]
            case "reasoning":
                self._add_reasoning(convert(item, _Reasoning, where), where)
            case "function_call":
                called = convert(item, _FunctionCall, where)
                refuse_unhonoured(called, _NEUTRAL_CALL, where)
                answer = self._reply_to("function_call", called.id)
                answer.setdefault("tool_calls", []).append(_tool_call(called))
            case _:
                output = convert(item, _FunctionCallOutput, where)
                refuse_unhonoured(output, _NEUTRAL_OUTPUT, where)
                text = _text(output.output, f"{where}.output")
                self.messages.append({"role": "tool", "content": text, "tool_call_id": output.call_id})

    def _add_reasoning(self, item: _Reasoning, where: str) -> None:
        answer = self._reply_to("reasoning", item.id)
        texts = [part.text for part in item.content]
        if not texts and item.encrypted_content:
            texts = [_decrypted(item.encrypted_content, f"{where}.encrypted_content")]
        if text := "".join(texts or [part.text for part in item.summary]):
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _reply_to(self, kind: str, item_id: str) -> ChatMessage:
        """The message that an item of an answer belongs to."""
        ours = _OUR_ID.fullmatch(item_id)
        call_id = ours[1] if ours else None
        if self._answer is None or not self._continues(self._answer, kind, call_id):
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        if call_id:
            self._answer["id"] = call_id
        self._last = kind
        return self._answer

    def _continues(self, answer: ChatMessage, kind: str, call_id: str | None) -> bool:
        known = answer.get("id")
        if known and call_id:
            return known == call_id
        if self.messages[-1] is not answer:
            return False
        if kind == self._last:
            return kind == "function_call"
        return _ORDER.index(kind) > _ORDER.index(self._last)


def _type_of(item: dict[str, Any], where: str) -> str:
    """Type of an item that we know. Raises GatewayError 400 for others, by name."""
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    if kind in (*_ORDER, "function_call_output"):
        return kind
    if kind == "item_reference":
        remedy = "send the item itself, or go on from a response by previous_response_id"
        raise unsupported(f"{where}.type", kind, remedy)
    message = f"items of the type {kind!r} are not supported; use messages, function calls and their outputs"
    raise GatewayError(400, "unsupported_content", message, param=f"{where}.type")


def _message(message: _Message, where: str) -> ChatMessage:
    if message.phase is not None:
        raise unsupported(f"{where}.phase", message.phase)
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": _text(message.content, f"{where}.content")}


def _tool_call(call: _FunctionCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _text(content: Parts, where: str) -> str:
    """The text of a content: parts are joined as they are."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        if part.get("type") not in ("input_text", "output_text", "text"):
            raise unsupported_content(part.get("type"), at)
        text = convert(part, _Text, at)
        if text.annotations:
            raise unsupported(f"{at}.annotations", text.annotations)
        texts.append(text.text)
    return "".join(texts)


def _decrypted(text: str, where: str) -> str:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        message = "this encrypted_content is not of this server; leave the reasoning item out"
        raise invalid(where, message) from error


def _tool(tool: dict[str, Any], where: str) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise unsupported(f"{where}.type", kind, "only functions that your program runs can be given")
    definition = convert(tool, _FunctionTool, where)
    refuse_unhonoured(definition, _NEUTRAL_TOOL, where)
    function: dict[str, Any] = {"name": definition.name}
    if definition.description is not None:
        function["description"] = definition.description
    if definition.parameters is not None:
        function["parameters"] = definition.parameters
    return {"type": "function", "function": function}
