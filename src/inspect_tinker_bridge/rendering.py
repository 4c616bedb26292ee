"""Render Inspect messages as prompt ids, and turn sampled actions into Inspect model outputs.

Text survives to the character. An action that does not parse becomes text or a failed tool call. While the
history is unmodified, the next prompt is the previous prompt ids + sampled ids + newly rendered ids
(`TokenBuffer`). Otherwise the whole prompt is rendered as a fork.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias
from uuid import uuid4

import tinker
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    Content,
    ContentImage,
    ContentReasoning,
    ContentText,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolChoice, ToolFunction, ToolInfo
from tinker_cookbook.renderers import (
    ContentPart,
    ImagePart,
    Message,
    ParseTermination,
    RenderContext,
    Renderer,
    TextPart,
    ThinkingPart,
    ToolSpec,
    UnparsedToolCall,
    format_content_as_string,
)
from tinker_cookbook.renderers import ToolCall as RendererToolCall

from inspect_tinker_bridge.conversion import parse_arguments, tool_call
from inspect_tinker_bridge.errors import UnsupportedError

UNPARSED = "unparsed_tool_call"  # A call that did not parse. Its argument `raw_text` has the text.


# In Qwen's and Hermes' words.
TOOLS_AS_TEXT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""  # noqa: E501

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ContinuingRenderer(Renderer):
    @abstractmethod
    def read(self, action: list[int], tools: list[ToolSpec]) -> tuple[Message, ParseTermination]:
        """Parse an action, and return how it ended. Without `tools`, calls are text."""

    @abstractmethod
    def continuation(
        self, prompt: list[int], action: list[int], history: list[Message], messages: list[Message]
    ) -> list[int] | None:
        """The ids to append to `prompt` and its sampled `action` to generate after `messages`.

        None if the renderer then rewrites the `history`.
        """


def to_renderer_messages(
    renderer: Renderer, messages: Sequence[ChatMessage], tools: Sequence[ToolInfo], tool_choice: ToolChoice
) -> list[Message]:
    """Convert a conversation and its tools, which become text if the renderer has no format for them.

    Raises UnsupportedError for content other than text, reasoning and images.
    """
    converted = [to_renderer_message(renderer, message) for message in messages]
    specs = offered_tools(tools, tool_choice)
    if not specs:
        return converted
    system = ""
    if converted and converted[0]["role"] == "system":
        system = format_content_as_string(converted.pop(0)["content"], separator="")
    if _declares_tools(renderer):
        return [*renderer.create_conversation_prefix_with_tools(specs, system), *converted]
    functions = [json.dumps({"type": "function", "function": spec}, ensure_ascii=False) for spec in specs]
    declared = TOOLS_AS_TEXT.format("\n".join(functions))
    return [Message(role="system", content=f"{system}\n\n{declared}".lstrip()), *converted]


def _declares_tools(renderer: Renderer) -> bool:
    tool = ToolSpec(name="any", description="", parameters={"type": "object", "properties": {}})
    try:
        renderer.create_conversation_prefix_with_tools([tool])
    except NotImplementedError:
        return False
    return True


def to_renderer_message(renderer: Renderer, message: ChatMessage) -> Message:
    """A tool error becomes `Error: ...`, as in Inspect."""
    converted = _to_renderer_message(message)
    return converted if _declares_tools(renderer) else _as_text(converted)


def _as_text(message: Message) -> Message:
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}'
        "\n</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    content = message["content"]
    if message["role"] == "tool":
        text = format_content_as_string(content, separator="")
        return Message(role="user", content=f"<tool_response>\n{text}\n</tool_response>")
    if not calls:
        return message
    if isinstance(content, str):
        return Message(role="assistant", content="\n".join(filter(None, [content, *calls])))
    return Message(role="assistant", content=[*content, TextPart(type="text", text="\n".join(calls))])


def _with_calls(message: Message) -> Message:
    content = message["content"]
    parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content
    calls: list[RendererToolCall] = []
    unparsed: list[UnparsedToolCall] = []
    kept: list[ContentPart] = []
    for part in parts:
        if part["type"] == "text":
            for raw in _CALL.findall(part["text"]):
                try:
                    said = json.loads(raw)
                    body = RendererToolCall.FunctionBody(
                        name=said["name"], arguments=json.dumps(said.get("arguments", {}))
                    )
                    calls.append(RendererToolCall(id=_new_call_id(), function=body))
                except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                    text = f"<tool_call>{raw}</tool_call>"
                    problem = f"the call is no JSON object with a name and arguments: {error!r}"
                    unparsed.append(UnparsedToolCall(raw_text=text, error=problem))
            part = TextPart(type="text", text=_CALL.sub("", part["text"]).strip())
        kept.append(part)
    if not calls and not unparsed:
        return message
    read = Message(role="assistant", content=kept)
    if isinstance(content, str):
        read["content"] = format_content_as_string(kept, separator="")
    if calls:
        read["tool_calls"] = calls
    if unparsed:
        read["unparsed_tool_calls"] = unparsed
    return read


def _to_renderer_message(message: ChatMessage) -> Message:
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


@dataclass(frozen=True)
class ParsedAction:
    message: Message
    is_well_formed: bool  # It ended properly and its tool calls parsed.


def parse_action(
    renderer: Renderer, action: list[int], tools: list[ToolSpec], *, stop_texts: Sequence[str] = ()
) -> ParsedAction:
    """Parse an action (token ids) up to the first of `stop_texts`. Without `tools`, calls are text."""
    text = _text(renderer, action)
    stopped = any(stop in text for stop in stop_texts)
    ended = [*action, *_end(renderer)] if stopped else action
    try:
        if isinstance(renderer, ContinuingRenderer):
            message, termination = renderer.read(ended, tools)
        else:
            message, termination = renderer.parse_response(ended)
            if tools and not _declares_tools(renderer):
                message = _with_calls(message)
        well_formed = termination.is_clean
    except Exception as error:  # noqa: BLE001 (parsers let out whatever the text makes JSON and pydantic raise)
        problem = f"the reply could not be parsed: {error}".encode("ascii", "backslashreplace").decode()
        unparsed = UnparsedToolCall(raw_text=text, error=problem)
        message = Message(role="assistant", content="", unparsed_tool_calls=[unparsed])
        well_formed = False
    if not tools and (message.get("tool_calls") or message.get("unparsed_tool_calls")):
        message = Message(role="assistant", content=text)
    if message.get("unparsed_tool_calls"):
        well_formed = False
    return ParsedAction(_cut(message, stop_texts) if stopped else message, well_formed)


def _text(renderer: Renderer, action: list[int]) -> str:
    stops = {stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)}
    end = next((index for index, token in enumerate(action) if token in stops), None)
    return str(renderer.tokenizer.decode(action[:end]))


def _end(renderer: Renderer) -> list[int]:
    stop = renderer.get_stop_sequences()[0]
    return [stop] if isinstance(stop, int) else renderer.tokenizer.encode(stop, add_special_tokens=False)


def _cut(message: Message, stops: Sequence[str]) -> Message:
    # Tool calls after the stop text are dropped.
    content = message["content"]
    parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content
    kept: list[ContentPart] = []
    for part in parts:
        if part["type"] == "text":
            found = [at for stop in stops if (at := part["text"].find(stop)) >= 0]
            if found:
                kept.append(TextPart(type="text", text=part["text"][: min(found)]))
                break
        kept.append(part)
    cut = message.copy()
    cut["content"] = format_content_as_string(kept, separator="") if isinstance(content, str) else kept
    return cut


def to_model_output(
    message: Message, *, prompt_tokens: int, sampled_tokens: int, truncated: bool
) -> ModelOutput:
    """`truncated`: sampling reached its token limit. NUL characters, which no sandbox accepts, become
    U+FFFD."""
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
    if any(part["type"] == "image" for part in parts):
        return parts
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
    if isinstance(item, ContentImage):
        return ImagePart(type="image", image=item.image)
    raise UnsupportedError(
        f"the task's messages have {item.type} content; only text, reasoning and images are supported"
    )


def _to_renderer_call(call: ToolCall) -> RendererToolCall:
    body = RendererToolCall.FunctionBody(name=call.function, arguments=json.dumps(call.arguments))
    return RendererToolCall(id=call.id, function=body)


def _to_inspect_content(message: Message) -> str | list[Content]:
    content = message["content"]
    if isinstance(content, str):
        return _clean(content)
    if all(part["type"] == "text" for part in content):
        return _clean("".join(part["text"] for part in content if part["type"] == "text"))
    converted: list[Content] = []
    for part in content:
        if part["type"] == "text":
            converted.append(ContentText(text=_clean(part["text"])))
        elif part["type"] == "thinking":
            converted.append(ContentReasoning(reasoning=_clean(part["thinking"])))
        else:
            raise UnsupportedError(f"the renderer parsed {part['type']} content from an action")
    return converted


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _to_inspect_calls(message: Message) -> list[ToolCall]:
    calls = [_to_inspect_call(call) for call in message.get("tool_calls", [])]
    unparsed = [
        ToolCall(
            id=_new_call_id(),
            function=UNPARSED,
            arguments={"raw_text": _clean(call.raw_text)},
            parse_error=call.error,
        )
        for call in message.get("unparsed_tool_calls", [])
    ]
    return calls + unparsed


def _to_inspect_call(call: RendererToolCall) -> ToolCall:
    raw = call.function.arguments
    arguments, problem = parse_arguments(raw)
    kept = {"raw_text": _clean(raw)} if problem else arguments
    return tool_call(_clean(call.id or _new_call_id()), call.function.name, kept, problem)


def _new_call_id() -> str:
    return f"call_{uuid4().hex[:12]}"


def offered_tools(tools: Sequence[ToolInfo], choice: ToolChoice) -> list[ToolSpec]:
    if choice == "none":
        return []
    if isinstance(choice, ToolFunction):
        tools = [tool for tool in tools if tool.name == choice.name]
    return [
        ToolSpec(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters.model_dump(exclude_none=True),
        )
        for tool in tools
    ]


Piece: TypeAlias = int | tinker.ModelInputChunk


@dataclass(frozen=True)
class Prompt:
    pieces: list[Piece]
    is_fork: bool
    """Whether the history was modified, or the renderer rewrites it."""

    @property
    def length(self) -> int:
        # An image of unknown length counts as one token.
        return sum(getattr(piece, "expected_tokens", None) or 1 for piece in self.pieces)

    @property
    def model_input(self) -> tinker.ModelInput:
        chunks: list[tinker.ModelInputChunk] = []
        for is_id, group in groupby(self.pieces, lambda piece: isinstance(piece, int)):
            pieces: list[Any] = list(group)
            chunks += [tinker.EncodedTextChunk(tokens=pieces)] if is_id else pieces
        return tinker.ModelInput(chunks=chunks)


@dataclass(frozen=True)
class _Turn:
    messages: list[Message]
    rendered: list[Piece]  # For generation, independent of sampled ids.
    ids: list[Piece]  # The sampled prompt and the action.
    prompt_length: int

    reply: Message

    def is_continued_by(self, messages: list[Message]) -> bool:
        return messages[: len(self.messages) + 1] == [*self.messages, self.reply]


class TokenBuffer:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        stops = renderer.get_stop_sequences()
        self._stop_ids = {stop for stop in stops if isinstance(stop, int)}
        self._turns: list[_Turn] = []
        self._pending: tuple[list[Message], list[Piece], list[Piece]] | None = None

    def render(self, messages: list[Message]) -> Prompt:
        """Render the next prompt. A trailing assistant message is its prefill.

        Raises UnsupportedError for images if the renderer does not take them.
        """
        rendered = self._render_all(messages)
        continued = (turn for turn in reversed(self._turns) if turn.is_continued_by(messages))
        splices = (self._splice(turn, messages, rendered) for turn in continued)
        spliced = next((ids for ids in splices if ids is not None), None)
        pieces = spliced or rendered
        self._pending = (messages, rendered, pieces)
        previous = self._turns[-1].ids if self._turns else []
        return Prompt(pieces, is_fork=pieces[: len(previous)] != previous)

    def record(self, action: list[int], reply: Message) -> None:
        if self._pending is None:
            raise ValueError("record() needs a prompt; call render() first")
        messages, rendered, pieces = self._pending
        self._turns.append(_Turn(messages, rendered, [*pieces, *action], len(pieces), reply))
        self._pending = None

    def _render_all(self, messages: list[Message]) -> list[Piece]:
        images = _images(messages)
        if not images:
            return self._built(messages)
        name = type(self._renderer).__name__
        try:
            pieces = self._built(messages)
        except Exception as error:
            raise UnsupportedError(
                f"the renderer {name} cannot render the {images} images of the task's messages: {error!r}; "
                "use a vision model's renderer, made with its image processor"
            ) from error
        if sum(not isinstance(piece, int) for piece in pieces) < images:
            raise UnsupportedError(
                f"the renderer {name} leaves out images of the task's messages, which have {images}; use a "
                "vision model's renderer"
            )
        return pieces

    def _built(self, messages: list[Message]) -> list[Piece]:
        if messages and messages[-1]["role"] == "assistant":
            content = messages[-1]["content"]
            if isinstance(content, str):
                return _pieces(self._renderer.build_generation_prompt(messages[:-1], prefill=content))
        return _pieces(self._renderer.build_generation_prompt(messages))

    def _splice(self, turn: _Turn, messages: list[Message], rendered: list[Piece]) -> list[Piece] | None:
        """Return None if `messages` do not extend `turn`."""
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
    ) -> list[Piece] | None:
        count = len(turn.messages) + 1
        prefill = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        new = messages[count:-1] if prefill else messages[count:]
        if not new or not isinstance(prefill, str) or any(each["role"] == "assistant" for each in new):
            return None  # Later replies must not be rendered anew.
        before: Any = turn.ids  # Ids alone: a renderer that continues takes no images.
        prompt, action = before[: turn.prompt_length], before[turn.prompt_length :]
        ids = renderer.continuation(prompt, action, messages[:count], new)
        return None if ids is None else before + ids + self._encoded(prefill)

    def _encoded(self, text: str) -> list[int]:
        return self._renderer.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _rendered_reply(self, messages: list[Message], index: int) -> list[Piece]:
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
        return _pieces(tinker.ModelInput(chunks=list(output)))


def _pieces(prompt: tinker.ModelInput) -> list[Piece]:
    return [
        piece
        for chunk in prompt.chunks
        for piece in (chunk.tokens if isinstance(chunk, tinker.EncodedTextChunk) else [chunk])
    ]


def _images(messages: Sequence[Message]) -> int:
    contents = [message["content"] for message in messages]
    return sum(
        part["type"] == "image" for content in contents if not isinstance(content, str) for part in content
    )
