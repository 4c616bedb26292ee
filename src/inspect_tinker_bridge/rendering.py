"""Inspect messages -> prompt ids by a renderer, and sampled actions -> Inspect model outputs.

Invariants: text survives to the character, and what a renderer cannot express raises ConversionError. While
the history is unmodified, the next prompt is the previous prompt ids + sampled ids + newly rendered ids
(`TokenBuffer`); sampled text is never tokenized again. A modified history is a fork: the whole prompt is
rendered. So is one that the renderer itself writes differently once it goes on.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import tinker
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    Content,
    ContentReasoning,
    ContentText,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo
from tinker_cookbook.renderers import (
    ContentPart,
    Message,
    RenderContext,
    Renderer,
    TextPart,
    ThinkingPart,
    ToolSpec,
    format_content_as_string,
)
from tinker_cookbook.renderers import ToolCall as RendererToolCall

from inspect_tinker_bridge.errors import ConversionError

UNPARSED = "unparsed_tool_call"
"""Function name of a tool call that the renderer could not parse; its argument `raw_text` has the text."""


class ContinuingRenderer(Renderer):
    """A renderer that knows itself how a conversation goes on after sampled ids, and what they say."""

    @abstractmethod
    def read(self, action: list[int], tools: list[ToolSpec]) -> Message:
        """The message of an action; without `tools`, what looks like a call is text."""

    @abstractmethod
    def continuation(
        self, prompt: list[int], action: list[int], history: list[Message], messages: list[Message]
    ) -> list[int] | None:
        """The ids to append to `prompt` and the `action` sampled for it, to generate after `messages`.

        `history` is the conversation of the prompt and the action's message. None if the renderer writes the
        history differently once the messages follow it.
        """


def to_renderer_messages(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[ToolInfo], tool_choice: ToolChoice
) -> list[Message]:
    """Convert a conversation, with its tools declared the way the renderer declares them.

    Raises ConversionError for content other than text and reasoning, and for tools if the renderer cannot
    declare any.
    """
    converted = [to_renderer_message(message) for message in messages]
    specs = offered_tools(tools, tool_choice)
    if not specs:
        return converted
    system = ""
    if converted and converted[0]["role"] == "system":
        system = format_content_as_string(converted.pop(0)["content"], separator="")
    try:
        return [*renderer.create_conversation_prefix_with_tools(specs, system), *converted]
    except NotImplementedError as error:
        names = ", ".join(spec["name"] for spec in specs)
        raise ConversionError(
            f"the renderer {type(renderer).__name__} cannot declare tools; the task offers {names}"
        ) from error


def to_renderer_message(message: ChatMessage) -> Message:
    """Convert one message. A tool error becomes `Error: ...`, as Inspect sends it to other models."""
    converted = Message(role=message.role, content=_content(message))
    if message.role == "assistant" and message.tool_calls:
        calls = [_to_renderer_call(call) for call in message.tool_calls if call.function != UNPARSED]
        if calls:
            converted["tool_calls"] = calls
    if message.role == "tool":
        if message.tool_call_id is not None:
            converted["tool_call_id"] = message.tool_call_id
        if message.function is not None:
            converted["name"] = message.function
    return converted


def parse_action(renderer: Renderer, action: list[int], tools: list[ToolSpec]) -> Message:
    """Parse an action (token ids). If no `tools` are offered, what looks like a tool call is text."""
    if isinstance(renderer, ContinuingRenderer):
        return renderer.read(action, tools)
    message, _ = renderer.parse_response(action)
    if tools or not (message.get("tool_calls") or message.get("unparsed_tool_calls")):
        return message
    stops = {stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)}
    ids = action[:-1] if action[-1] in stops else action
    return Message(role="assistant", content=str(renderer.tokenizer.decode(ids)))


def to_model_output(
    message: Message, *, prompt_tokens: int, sampled_tokens: int, truncated: bool
) -> ModelOutput:
    """Build the solver's model output. `truncated`: sampling stopped at its token limit."""
    calls = _to_inspect_calls(message)
    stop: StopReason = "max_tokens" if truncated else "tool_calls" if calls else "stop"
    reply = ChatMessageAssistant(
        content=_to_inspect_content(message), tool_calls=calls or None, model="policy", source="generate"
    )
    usage = ModelUsage(
        input_tokens=prompt_tokens, output_tokens=sampled_tokens, total_tokens=prompt_tokens + sampled_tokens
    )
    return ModelOutput(
        model="policy", choices=[ChatCompletionChoice(message=reply, stop_reason=stop)], usage=usage
    )


def _content(message: ChatMessage) -> str | list[ContentPart]:
    if message.role == "tool" and message.error is not None:
        return f"Error: {message.error.message}"
    unparsed = _unparsed_text(message)
    if isinstance(message.content, str):
        return message.content + unparsed
    parts = [_part(item) for item in message.content]
    if message.role == "assistant":
        return [*parts, TextPart(type="text", text=unparsed)] if unparsed else parts
    return "".join(part["text"] for part in parts if part["type"] == "text")


def _unparsed_text(message: ChatMessage) -> str:
    if message.role != "assistant":
        return ""
    calls = [call for call in message.tool_calls or [] if call.function == UNPARSED]
    return "".join(str(call.arguments.get("raw_text", "")) for call in calls)


def _part(item: Content) -> ContentPart:
    if isinstance(item, ContentText):
        return TextPart(type="text", text=item.text)
    if isinstance(item, ContentReasoning):
        return ThinkingPart(type="thinking", thinking=item.reasoning)
    raise ConversionError(
        f"the task's messages have {item.type} content; only text and reasoning are supported"
    )


def _to_renderer_call(call: ToolCall) -> RendererToolCall:
    body = RendererToolCall.FunctionBody(name=call.function, arguments=json.dumps(call.arguments))
    return RendererToolCall(id=call.id, function=body)


def _to_inspect_content(message: Message) -> str | list[Content]:
    content = message["content"]
    if isinstance(content, str):
        return content
    if all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content if part["type"] == "text")
    converted: list[Content] = []
    for part in content:
        if part["type"] == "text":
            converted.append(ContentText(text=part["text"]))
        elif part["type"] == "thinking":
            converted.append(ContentReasoning(reasoning=part["thinking"]))
        else:
            raise ConversionError(f"the renderer parsed {part['type']} content from an action")
    return converted


def _to_inspect_calls(message: Message) -> list[ToolCall]:
    calls = [
        ToolCall(
            id=call.id or _new_call_id(),
            function=call.function.name,
            arguments=json.loads(call.function.arguments),
        )
        for call in message.get("tool_calls", [])
    ]
    unparsed = [
        ToolCall(
            id=_new_call_id(),
            function=UNPARSED,
            arguments={"raw_text": call.raw_text},
            parse_error=call.error,
        )
        for call in message.get("unparsed_tool_calls", [])
    ]
    return calls + unparsed


def _new_call_id() -> str:
    return f"call_{uuid4().hex[:12]}"


def offered_tools(tools: Sequence[ToolInfo], choice: ToolChoice) -> list[ToolSpec]:
    """The tools that a request offers to the model."""
    if choice == "none":
        return []
    if isinstance(choice, ToolFunction):
        tools = [tool for tool in tools if tool.name == choice.name]
    return [
        ToolSpec(name=tool.name, description=tool.description, parameters=_parameters(tool)) for tool in tools
    ]


def _parameters(tool: ToolInfo) -> dict[str, Any]:
    return tool.parameters.model_dump(exclude_none=True)


@dataclass(frozen=True)
class Prompt:
    """The ids of one model call."""

    ids: list[int]
    is_fork: bool
    """Whether it does not extend the previous prompt and its action: the history was modified, the solver
    switched conversations, or the renderer writes the history differently."""

    is_rewritten: bool = False
    """Whether the messages continue an earlier call, and the renderer writes that call's differently."""


@dataclass(frozen=True)
class _Turn:
    """An answered prompt."""

    messages: list[Message]
    rendered: list[int]
    """`messages` rendered for generation, regardless of what was sampled."""

    ids: list[int]
    """The prompt ids that were sampled from, then the action."""

    prompt_length: int

    reply: Message

    def is_continued_by(self, messages: list[Message]) -> bool:
        """Whether `messages` repeat this turn and its reply."""
        return messages[: len(self.messages) + 1] == [*self.messages, self.reply]


class TokenBuffer:
    """Renders the successive prompts of one episode. One per episode, one call at a time."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        stops = renderer.get_stop_sequences()
        self._stop_ids = {stop for stop in stops if isinstance(stop, int)}
        self._turns: list[_Turn] = []
        self._pending: tuple[list[Message], list[int], list[int]] | None = None

    def render(self, messages: list[Message]) -> Prompt:
        """Render the prompt for the next assistant message. A trailing assistant message is its prefill."""
        rendered = self._render_all(messages)
        continued = [turn for turn in reversed(self._turns) if turn.is_continued_by(messages)]
        splices = (self._splice(turn, messages, rendered) for turn in continued)
        spliced = next((ids for ids in splices if ids is not None), None)
        ids = spliced or rendered
        self._pending = (messages, rendered, ids)
        previous = self._turns[-1].ids if self._turns else []
        is_fork = ids[: len(previous)] != previous
        return Prompt(ids, is_fork, is_rewritten=is_fork and bool(continued) and spliced is None)

    def record(self, action: list[int], reply: Message) -> None:
        """Record the action sampled for the last prompt, and `reply`, the message the solver got for it."""
        if self._pending is None:
            raise ValueError("record() needs a prompt; call render() first")
        messages, rendered, ids = self._pending
        self._turns.append(_Turn(messages, rendered, ids + action, len(ids), reply))
        self._pending = None

    def _render_all(self, messages: list[Message]) -> list[int]:
        if messages and messages[-1]["role"] == "assistant":
            content = messages[-1]["content"]
            if isinstance(content, str):
                return _ids(self._renderer.build_generation_prompt(messages[:-1], prefill=content))
        return _ids(self._renderer.build_generation_prompt(messages))

    def _splice(self, turn: _Turn, messages: list[Message], rendered: list[int]) -> list[int] | None:
        """`turn`'s ids plus the rendering of what follows it in `messages`; None if it does not extend it."""
        count = len(turn.messages)
        if isinstance(self._renderer, ContinuingRenderer):
            return self._continued(self._renderer, turn, messages)
        if not self._renderer.has_extension_property:
            return None
        reply = self._rendered_reply(messages, count)
        start = turn.rendered + reply
        if not reply or reply[-1] not in self._stop_ids or rendered[: len(start)] != start:
            return None
        close = [] if turn.ids[-1] in self._stop_ids else [reply[-1]]
        return turn.ids + close + rendered[len(start) :]

    def _continued(
        self, renderer: ContinuingRenderer, turn: _Turn, messages: list[Message]
    ) -> list[int] | None:
        count = len(turn.messages) + 1
        prefill = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        new = messages[count:-1] if prefill else messages[count:]
        if not new or not isinstance(prefill, str) or any(each["role"] == "assistant" for each in new):
            return None  # Replies since then were sampled, and are not to be rendered.
        prompt, action = turn.ids[: turn.prompt_length], turn.ids[turn.prompt_length :]
        ids = renderer.continuation(prompt, action, messages[:count], new)
        return None if ids is None else turn.ids + ids + self._encoded(prefill)

    def _encoded(self, text: str) -> list[int]:
        return self._renderer.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _rendered_reply(self, messages: list[Message], index: int) -> list[int]:
        """Ids of the reply as rendered after its header, including the end of the message."""
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        context = RenderContext(
            idx=index,
            is_last=index == len(messages) - 1,
            prev_message=messages[index - 1] if index else None,
            next_message=messages[index + 1] if index + 1 < len(messages) else None,
            last_user_index=max(users, default=-1),
            in_last_assistant_turn=not users or index > users[-1],
        )
        output = self._renderer.render_message(messages[index], context).output
        return _ids(tinker.ModelInput(chunks=list(output)))


def _ids(prompt: tinker.ModelInput) -> list[int]:
    """Token ids of a prompt. `to_ints` raises for images."""
    return list(prompt.to_ints())
