"""`ModelRenderer`: a model's chat format as a tinker_cookbook renderer, with the gateway's ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tinker
from tinker_cookbook.renderers import (
    Message,
    ParseTermination,
    RenderContext,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
)
from tinker_cookbook.renderers.base import RenderedMessage

from inspect_tinker_bridge.rendering import ContinuingRenderer
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions

# Declares tools as JSON; tinker_cookbook has the role for Kimi's format.
DECLARATION: Role = "tool_declare"

_NAMES = ("tool_call_id", "name")


class ModelRenderer(ContinuingRenderer):
    """Raises GatewayError 400 for messages that it cannot render."""

    def __init__(self, folder: Path, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError for a model without a chat format, or a template without these arguments."""
        self._folder = folder
        self._chat = ChatRenderer(folder, template_kwargs)
        super().__init__(cast("Any", self._chat.tokenizer))

    def __reduce__(self) -> tuple[type[ModelRenderer], tuple[Path, dict[str, Any]]]:
        return (ModelRenderer, (self._folder, self._chat.template_kwargs))

    def get_stop_sequences(self) -> list[int]:
        return list(self._chat.stop_token_ids)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        raise NotImplementedError("a chat template writes whole conversations, not single messages")

    def create_conversation_prefix_with_tools(
        self, tools: list[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        prefix = [Message(role=DECLARATION, content=json.dumps(_declared(tools)))]
        return [*prefix, Message(role="system", content=system_prompt)] if system_prompt else prefix

    def build_generation_prompt(
        self, messages: list[Message], role: Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        if role != "assistant":
            raise NotImplementedError(f"a chat template prompts for the assistant, not for {role!r}")
        conversation, tools = _split(messages)
        ids = self._chat.render(conversation, tools)
        return tinker.ModelInput.from_ints(ids + (self._chat.tokenizer.encode(prefill) if prefill else []))

    def continuation(
        self, prompt: list[int], action: list[int], history: list[Message], messages: list[Message]
    ) -> list[int] | None:
        conversation, tools = _split(history)
        new = [_chat_message(message) for message in messages]
        return self._chat.extend(prompt, action, new, tools, lambda: conversation)

    def parse_response(self, response: list[int]) -> tuple[Message, ParseTermination]:
        return self._read(response, ParseOptions(tool_calls=True))

    def read(self, action: list[int], tools: list[ToolSpec]) -> tuple[Message, ParseTermination]:
        return self._read(action, ParseOptions(tool_calls=bool(tools), tools=_declared(tools)))

    def _read(self, ids: list[int], options: ParseOptions) -> tuple[Message, ParseTermination]:
        stopped = any(token in self._chat.stop_token_ids for token in ids)
        ended = ParseTermination.STOP_SEQUENCE if stopped else ParseTermination.MALFORMED
        return cookbook_message(self._chat.parse(ids, options)), ended


def cookbook_message(message: ChatMessage) -> Message:
    content: Any = message["content"]
    if reasoning := message.get("reasoning_content"):
        thinking = ThinkingPart(type="thinking", thinking=reasoning)
        content = [thinking, TextPart(type="text", text=content)]
    converted = Message(role=message["role"], content=content)
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [
            ToolCall(id=call["id"], function=ToolCall.FunctionBody(**call["function"])) for call in calls
        ]
    return cast("Message", {**converted, **{name: text for name in _NAMES if (text := message.get(name))}})


def _chat_message(message: Message) -> ChatMessage:
    content: Any = message["content"]
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if others := {part["type"] for part in parts} - {"text", "thinking"}:
        raise ValueError(f"the chat format takes only text, but a message has {', '.join(sorted(others))}")
    role = "system" if message["role"] == "developer" else message["role"]
    converted: ChatMessage = {
        "role": role,
        "content": "".join(part["text"] for part in parts if part["type"] == "text"),
    }
    if thinking := "".join(part["thinking"] for part in parts if part["type"] == "thinking"):
        converted["reasoning_content"] = thinking
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [call.model_dump() for call in calls]
    return converted | {name: text for name in _NAMES if (text := message.get(name))}


def _declared(tools: Sequence[ToolSpec]) -> list[Tool]:
    return [{"type": "function", "function": dict(tool)} for tool in tools]


def _split(messages: Sequence[Message]) -> tuple[list[ChatMessage], list[Tool]]:
    if messages and messages[0]["role"] == DECLARATION:
        return [_chat_message(each) for each in messages[1:]], json.loads(str(messages[0]["content"]))
    return [_chat_message(each) for each in messages], []
