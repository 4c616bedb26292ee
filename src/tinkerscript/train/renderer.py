"""`ModelRenderer`: a model's own chat format as a renderer of tinker_cookbook, for supervised chats and for
episodes in the trainer's process.

It renders, continues and parses with the gateway's `ChatRenderer`, so that all ways to train see the same
ids. `engine.renderer` can name one of tinker_cookbook's renderers instead, if it writes the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tinker
import torch
from tinker_cookbook.exceptions import TinkerCookbookError
from tinker_cookbook.renderers import (
    Message,
    ParseTermination,
    RenderContext,
    Renderer,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolSpec,
    TrainOnWhat,
    get_renderer,
)
from tinker_cookbook.renderers.base import RenderedMessage
from transformers import AutoTokenizer

from inspect_tinker_bridge.rendering import ContinuingRenderer
from tinkerscript.config import EngineConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.rendering import CANONICAL, ChatRenderer, ParseOptions
from tinkerscript.model_folder import model_folder

DECLARATION: Role = "tool_declare"
"""Role of the message that declares tools; its content is JSON. tinker_cookbook has it for Kimi's format."""

_NAMES = ("tool_call_id", "name")

Example = tuple[tinker.ModelInput, torch.Tensor]
"""Ids, and the weight of each."""


class ModelRenderer(ContinuingRenderer):
    """The chat format of one model folder. Raises GatewayError 400 for messages that it cannot write."""

    def __init__(self, folder: Path, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """`template_kwargs`: arguments of the model's chat template. Raises ConfigError for a model without a
        chat format, or whose template does not have these arguments.
        """
        self._folder = folder
        self._chat = ChatRenderer(folder, template_kwargs)
        super().__init__(cast("Any", self._chat.tokenizer))

    def __reduce__(self) -> tuple[type[ModelRenderer], tuple[Path, dict[str, Any]]]:
        return (ModelRenderer, (self._folder, self._chat.template_kwargs))

    @property
    def uses_template(self) -> bool:
        """Whether the model's chat template writes the prompts."""
        return self._chat.uses_template

    def get_stop_sequences(self) -> list[int]:
        return list(self._chat.stop_token_ids)

    def render_message(self, message: Message, ctx: RenderContext) -> RenderedMessage:
        """Raises NotImplementedError: a chat template writes whole conversations."""
        raise NotImplementedError("a chat template writes whole conversations, not single messages")

    def create_conversation_prefix_with_tools(
        self, tools: list[ToolSpec], system_prompt: str = ""
    ) -> list[Message]:
        """The declaration of `tools` for the chat format, and the system message if there is one."""
        prefix = [Message(role=DECLARATION, content=json.dumps(_declared(tools)))]
        return [*prefix, Message(role="system", content=system_prompt)] if system_prompt else prefix

    def build_generation_prompt(
        self, messages: list[Message], role: Role = "assistant", prefill: str | None = None
    ) -> tinker.ModelInput:
        """The prompt of the assistant's next reply. Raises NotImplementedError for another role."""
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

    def build_supervised_examples(
        self, messages: list[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_TURN
    ) -> list[Example]:
        """Ids and weights of a chat: one sequence, or several where the format rewrites earlier turns.

        Each reply that trains follows the prompt that it would be sampled after. Raises NotImplementedError
        for a `train_on_what` that trains other messages.
        """
        conversation, tools = _split(messages)
        sequences: list[tuple[list[int], list[int]]] = []
        seen: list[ChatMessage] = []
        sampled: list[int] = []
        for index in _trained(messages[len(messages) - len(conversation) :], train_on_what):
            new = None
            ids, weights = sequences[-1] if sequences else ([], [])
            if seen:
                prompt, since = ids[: len(ids) - len(sampled)], conversation[len(seen) : index]
                new = self._chat.extend(prompt, sampled, since, tools, seen.copy)
            if new is None:
                new, ids, weights = self._chat.render(conversation[:index], tools), [], []
                sequences.append((ids, weights))
            sampled = self._chat.reply_ids(conversation[:index], conversation[index], tools)
            ids += new + sampled
            weights += [0] * len(new) + [1] * len(sampled)
            seen = conversation[: index + 1]
        return [(tinker.ModelInput.from_ints(ids), torch.tensor(weights)) for ids, weights in sequences]

    def build_supervised_example(
        self, messages: list[Message], train_on_what: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE
    ) -> Example:
        """The one sequence of a chat. Raises ValueError if it has several, or nothing in it trains."""
        examples = self.build_supervised_examples(messages, train_on_what)
        if len(examples) != 1:
            raise ValueError(f"the chat is {len(examples)} sequences; use build_supervised_examples")
        return examples[0]


def model_renderer(config: EngineConfig) -> Renderer:
    """The renderer of `engine.model`, or the one that `engine.renderer` names.

    Raises ConfigError for a model without a chat format, and a named renderer that is unknown or writes other
    prompts than the model's own format.
    """
    folder = model_folder(config.model)
    if not config.renderer:
        return ModelRenderer(folder, config.chat_template_kwargs)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    try:
        renderer = get_renderer(config.renderer, tokenizer)
        unlike = _first_difference(renderer, folder, config.chat_template_kwargs)
    except (TinkerCookbookError, ValueError) as error:
        raise ConfigError(f"engine.renderer: {config.renderer!r}: {error}") from error
    if unlike:
        raise ConfigError(
            f"engine.renderer: {config.renderer!r} does not write the prompts of {config.model!r}: {unlike}; "
            "leave engine.renderer empty for the model's own chat format"
        )
    return renderer


def _first_difference(renderer: Renderer, folder: Path, template_kwargs: Mapping[str, Any]) -> str:
    """The first of the `CANONICAL` prompts in which a renderer and a model's own format differ; "" for none.

    A model without a format takes any renderer.
    """
    try:
        own = ChatRenderer(folder, template_kwargs)
    except ConfigError:
        if template_kwargs:
            raise
        return ""
    for messages, tools in CANONICAL:
        try:
            expected = own.render(messages, tools)
            prefix, rest = _cookbook_prefix(renderer, messages, tools)
        except (GatewayError, NotImplementedError):
            continue  # Tools or system messages that one of them does not have.
        try:
            prompt = renderer.build_generation_prompt([*prefix, *map(cookbook_message, rest)]).to_ints()
        except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower
            return f"the model's tokenizer cannot encode its {messages[0]['role']} message: {error}"
        if prompt != expected:
            decode = own.tokenizer.decode
            return f"{decode(prompt)!r} instead of {decode(expected)!r}"
    return ""


def _cookbook_prefix(
    renderer: Renderer, messages: list[ChatMessage], tools: list[Tool]
) -> tuple[list[Message], list[ChatMessage]]:
    """The messages that declare the tools, and the others. Raises NotImplementedError if there are none."""
    if not tools:
        return [], messages
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    specs = [cast("ToolSpec", tool["function"]) for tool in tools]
    return renderer.create_conversation_prefix_with_tools(specs, system), messages[1 if system else 0 :]


def cookbook_message(message: ChatMessage) -> Message:
    """A message of the gateway as tinker_cookbook's."""
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
    """A message of tinker_cookbook as the gateway's. Raises ValueError for images and sounds."""
    content: Any = message["content"]
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if others := {part["type"] for part in parts} - {"text", "thinking"}:
        raise ValueError(f"the chat format takes text, and a message has {', '.join(sorted(others))}")
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
    """A conversation without the declaration of its tools, and the tools."""
    if messages and messages[0]["role"] == DECLARATION:
        return [_chat_message(each) for each in messages[1:]], json.loads(str(messages[0]["content"]))
    return [_chat_message(each) for each in messages], []


def _trained(messages: Sequence[Message], what: TrainOnWhat) -> list[int]:
    """The indices of the replies that train."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if what == TrainOnWhat.ALL_ASSISTANT_MESSAGES:
        return replies
    if what == TrainOnWhat.LAST_ASSISTANT_MESSAGE:
        return [index for index in replies if index == len(messages) - 1]
    if what == TrainOnWhat.LAST_ASSISTANT_TURN:
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        return [index for index in replies if index > last]
    if what == TrainOnWhat.CUSTOMIZED:
        chosen = [index for index, message in enumerate(messages) if message.get("trainable")]
        if set(chosen) <= set(replies):
            return chosen
    raise NotImplementedError(
        f"with the model's own chat format only replies can train, not {what}; name one of tinker_cookbook's "
        "renderers as engine.renderer"
    )
