"""`ChatRenderer` turns messages into token ids and sampled ids back into messages.

It uses the model's renderer from the `renderers` library if that writes the chat template's prompts,
otherwise the template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import msgspec
from renderers.base import (
    MODEL_RENDERER_MAP,
    Message,
    MultimodalRenderer,
    ParsedResponse,
    ParsedToolCall,
    Renderer,
    Tokenizer,
    ToolCallParseStatus,
    ToolSpec,
    create_renderer,
)
from renderers.configs import AutoRendererConfig, Qwen3RendererConfig, RendererConfig
from renderers.qwen3 import Qwen3Renderer

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import (
    ChatMessage,
    Tool,
    images_of,
    is_encodable,
    is_expressible,
    joined_parts,
)
from tinkerscript.gateway.chat_template import PROBE_CALL, PROBE_TOOL, ChatTemplate, with_image_places
from tinkerscript.gateway.images import ImageFormat
from tinkerscript.gateway.partial_reply import PartialReply
from tinkerscript.gateway.reply_format import QWEN3, NamedCall, ReplyFormat
from tinkerscript.gateway.template_rendering import TemplateRendering
from tinkerscript.model_folder import config_of, context_of, hub_id_of
from tinkerscript.tokenizer import (
    ESCAPED_MARK,
    THINK_END,
    THINK_START,
    LightTokenizer,
)

QWEN3_TYPES = frozenset({"qwen3", "qwen3_moe"})

# Characters; longer texts are encoded after rendering.
LONG_TEXT = 100
# Renderers that agree on these write the same chat format.
PROBE_CONVERSATIONS: list[tuple[list[ChatMessage], list[Tool]]] = [
    (PROBE_CALL[:1], []),
    ([{"role": "system", "content": "probe_system"}, *PROBE_CALL[:1]], []),
    ([*PROBE_CALL[:1], {"role": "assistant", "content": "probe_answer"}, *PROBE_CALL[:1]], []),
    ([{"role": "system", "content": "probe_system"}, *PROBE_CALL[:1]], [PROBE_TOOL]),
    (PROBE_CALL, [PROBE_TOOL]),
]


@dataclass(frozen=True, slots=True)
class Markers:
    think: int
    think_end: int
    tool_call: int
    tool_call_end: int


class _Unencoded(int):
    text: str


class _DeferringTokenizer:
    """Leaves long texts to `encoded`, because renderers slowly attribute every id to a message."""

    def __init__(self, tokenizer: LightTokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if len(text) < LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens)
        unencoded = _Unencoded(-1)
        unencoded.text = text
        return [unencoded]

    def encoded(self, ids: list[int]) -> list[int]:
        found: list[int] = []
        start = 0
        for _ in range(ids.count(-1)):
            at = ids.index(-1, start)
            found += ids[start:at]
            found += self.tokenizer.encode(cast("_Unencoded", ids[at]).text)
            start = at + 1
        return found + ids[start:]


class ParseOptions(msgspec.Struct, frozen=True):
    tool_calls: bool  # If false, their markup stays in the content.
    cut_at: Sequence[str] = ()  # They cut the text, but not the ids.
    tools: Sequence[Tool] = ()  # Some formats need them to tell strings from numbers.


class ChatRenderer:
    def __init__(self, folder: Path, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises ConfigError for an unreadable folder, a missing chat format, or a template without one of
        the arguments.
        """
        self.template_kwargs = dict(template_kwargs or {})
        template = ChatTemplate.of(folder, self.template_kwargs)
        if template is None and self.template_kwargs:
            raise ConfigError(f"engine.chat_template_kwargs: {folder} has no chat template")
        self.tokenizer = LightTokenizer(folder)
        self._template = TemplateRendering(template, self.tokenizer, folder) if template else None
        self._deferring = _DeferringTokenizer(self.tokenizer)
        self._renderer = _library_renderer(folder, self._deferring, self._template, self.template_kwargs)
        if self._renderer is None and self._template is None:
            raise _no_renderer(folder)
        # None if only the renderer reads replies, whole.
        self.reply_format = _format_of(self._renderer, self._template)
        # For grammars; None if unknown.
        self.markers = _markers(self.tokenizer) if isinstance(self._renderer, Qwen3Renderer) else None
        self.max_context = context_of(folder)
        self.stop_token_ids: list[int] = (
            list(self._renderer.get_stop_token_ids()) if self._renderer else self._by_template.stop_ids
        )

    @property
    def images(self) -> ImageFormat | None:
        return self._template.images if self._template and self._renderer is None else None

    @property
    def uses_template(self) -> bool:
        return self._renderer is None

    @property
    def _by_template(self) -> TemplateRendering:
        assert self._template is not None
        return self._template

    def render(self, messages: list[ChatMessage], tools: list[Tool]) -> list[int]:
        """Return the prompt ids [P]. Raises GatewayError 400."""
        given, specs = self._marked(messages, tools)
        unmarked = given is messages and specs is tools
        if self._renderer is None:
            return self._checked(self._by_template.prompt(given, specs), unmarked)
        try:
            ids = self._rendered(given, specs, prompts=True)
        except ValueError as error:
            raise _invalid(f"the messages cannot be rendered: {error}") from error
        return self._checked(ids, unmarked)

    def extend(
        self,
        tail: list[int],
        sampled: list[int],
        messages: list[ChatMessage],
        tools: list[Tool],
        history: Callable[[], list[ChatMessage]],
    ) -> list[int] | None:
        """Return the ids to append to `tail + sampled` so that the assistant replies to `messages`, or None
        if the chat format cannot continue.

        `tail` is only the last turn's prompt, so the cost does not grow with the conversation. Chat templates
        need the whole `history`.
        """
        if self._renderer is None:
            conversation = history()
            every = [*conversation, *messages]
            marked, specs = self._marked(every, tools)
            length = len(conversation)
            new_ids = self._by_template.continuation(marked[:length], sampled, marked[length:], specs)
            return new_ids and self._checked(new_ids, marked is every and specs is tools)
        given = self.tokenizer.escaper.messages(messages)
        new_ids = self._bridge(tail, sampled, given, tools)
        if new_ids is None and self._ends_in_reasoning(sampled):
            # The renderer refuses turns that it would not write, but only the end matters.
            new_ids = self._bridge(tail, sampled[-1:], given, tools)
        return new_ids and self._checked(new_ids, given is messages)

    def reply_ids(self, messages: list[ChatMessage], reply: ChatMessage, tools: list[Tool]) -> list[int]:
        """Return the ids [R] of `reply` after the prompt for `messages`, with the end of the turn.

        Raises GatewayError 400 if the chat format writes it differently.
        """
        every = [*messages, reply]
        marked, specs = self._marked(every, tools)
        if self._template is not None:
            return self._template.reply(marked[:-1], marked[-1], specs)
        prompt = self._rendered(marked[:-1], specs, prompts=True)
        ids = self._rendered(marked, specs)
        last = max((at for at, token in enumerate(ids) if token in self.stop_token_ids), default=-1)
        if ids[: len(prompt)] != prompt or last < len(prompt):
            raise _invalid("the model's chat format does not write this reply where it prompts for one")
        return ids[len(prompt) : last + 1]

    def _rendered(
        self, messages: list[ChatMessage], tools: list[Tool], *, prompts: bool = False
    ) -> list[int]:
        assert self._renderer is not None
        given = cast("list[Message]", messages)
        ids = self._renderer.render_ids(given, tools=_specs(tools), add_generation_prompt=prompts)
        return self._deferring.encoded(ids)

    def _marked(self, messages: list[ChatMessage], tools: list[Tool]) -> tuple[list[ChatMessage], list[Tool]]:
        escaper = self.tokenizer.escaper
        if self.images is not None and any(map(images_of, messages)):
            messages = list(map(with_image_places, messages))
        return escaper.messages(messages), escaper.marked(tools, tools) if tools else tools

    def _bridge(
        self, tail: list[int], sampled: list[int], messages: list[ChatMessage], tools: list[Tool]
    ) -> list[int] | None:
        assert self._renderer is not None
        before = tail + sampled
        bridged = self._renderer.bridge_to_next_turn(
            tail, sampled, cast("list[Message]", messages), tools=_specs(tools)
        )
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return self._deferring.encoded(bridged.token_ids[len(before) :])

    def _ends_in_reasoning(self, sampled: list[int]) -> bool:
        start, end = self.tokenizer.convert_tokens_to_ids([THINK_START, THINK_END])
        ended = bool(sampled) and sampled[-1] in self.stop_token_ids
        return ended and start in sampled and end not in sampled

    def _checked(self, ids: list[int], unmarked: bool) -> list[int]:
        # An escaped mark cannot be restored.
        if not unmarked and ESCAPED_MARK in self.tokenizer.decode(ids):
            raise _invalid(
                "this model's chat format cannot write special tokens as text; remove them from the messages"
            )
        return ids

    def parse(self, sampled: list[int], options: ParseOptions) -> ChatMessage:
        """Parse a reply [R] without losing text. Malformed tool calls stay content."""
        ids = self._before_stop(sampled)
        if self.reply_format is not None:
            read = self.reply_format.read(
                self.tokenizer.decode(ids), tool_calls=options.tool_calls, tools=options.tools
            )
            return _message(joined_parts(read.content), read.reasoning, read.calls, options.cut_at)
        assert self._renderer is not None
        parsed = self._renderer.parse_response(sampled)
        calls = [call for call in parsed.tool_calls if options.tool_calls and _is_complete(call)]
        named = [(cast("str", call.name), cast("dict[str, Any]", call.arguments)) for call in calls]
        content = self._content(ids, parsed, calls)
        return _message(content, parsed.reasoning_content or "", named, options.cut_at)

    def partial(self, options: ParseOptions) -> PartialReply:
        return PartialReply(
            self.tokenizer.token_bytes,
            self.reply_format,
            stop_ids=self.stop_token_ids,
            tool_calls=options.tool_calls,
            cut_at=options.cut_at,
        )

    def text(self, sampled: list[int], cut_at: Sequence[str]) -> str:
        return _cut_at_stops(self.tokenizer.decode(self._before_stop(sampled)), cut_at)

    def partial_text(self, cut_at: Sequence[str]) -> PartialReply:
        return PartialReply(
            self.tokenizer.token_bytes, None, stop_ids=self.stop_token_ids, cut_at=cut_at, plain=True
        )

    def _before_stop(self, sampled: list[int]) -> list[int]:
        end = next((index for index, token in enumerate(sampled) if token in self.stop_token_ids), None)
        return sampled[:end]

    def _content(self, ids: list[int], parsed: ParsedResponse, calls: list[ParsedToolCall]) -> str:
        # Renderers return only the text before the first attempted call.
        spans = [attempt.token_span for attempt in parsed.tool_calls if attempt.token_span is not None]
        position = spans[0][0] if spans else len(ids)
        parts = [parsed.content]
        for attempt in parsed.tool_calls:
            if attempt.token_span is None:
                parts += [] if attempt in calls else [attempt.raw]
            elif attempt in calls:
                start, end = attempt.token_span
                parts.append(self.tokenizer.decode(ids[position:start]))
                position = end
        if spans:
            parts.append(self.tokenizer.decode(ids[position:]))
        return joined_parts(parts)


def _library_renderer(
    folder: Path,
    deferring: _DeferringTokenizer,
    template: TemplateRendering | None,
    template_kwargs: Mapping[str, Any],
) -> Renderer | None:
    for config, name in _candidates(folder, template_kwargs):
        deferring.tokenizer.name_or_path = name or str(folder)
        defers = isinstance(config, Qwen3RendererConfig)
        try:
            renderer = create_renderer(
                cast("Tokenizer", deferring if defers else deferring.tokenizer), config
            )
        except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
            if template is None:
                raise ConfigError(f"the chat renderer does not fit the model in {folder}: {error}") from error
            continue
        if isinstance(renderer, MultimodalRenderer):
            if template is None:
                raise ConfigError(f"{folder} is a multimodal model; only text models are supported")
        elif template is None or _fits(
            renderer, deferring, template, has_history=_writes_history_alike(config)
        ):
            return renderer
    return None


def _format_of(renderer: Renderer | None, template: TemplateRendering | None) -> ReplyFormat | None:
    if isinstance(renderer, Qwen3Renderer):
        return QWEN3
    return template.format if template and (renderer is None or template.format.reads_calls) else None


def _candidates(
    folder: Path, template_kwargs: Mapping[str, Any]
) -> Iterator[tuple[RendererConfig, str | None]]:
    config = config_of(folder)
    # Kept reasoning lets each turn extend the last.
    if config.get("model_type") in QWEN3_TYPES and not template_kwargs.keys() - {"enable_thinking"}:
        for thinks in (True, False):
            yield Qwen3RendererConfig(thinking_retention="all", enable_thinking=thinks), None
    for name in () if template_kwargs else (config.get("_name_or_path"), hub_id_of(folder)):
        if isinstance(name, str) and name in MODEL_RENDERER_MAP:
            yield AutoRendererConfig(thinking_retention="all"), name


def _writes_history_alike(config: RendererConfig) -> bool:
    # Without thinking, the history keeps empty reasoning.
    return not isinstance(config, Qwen3RendererConfig) or config.enable_thinking


def _fits(
    renderer: Renderer, deferring: _DeferringTokenizer, template: TemplateRendering, *, has_history: bool
) -> bool:
    for messages, tools in PROBE_CONVERSATIONS:
        if not has_history and any(message["role"] == "assistant" for message in messages):
            continue
        try:
            expected = template.prompt(messages, tools)
        except GatewayError:
            continue
        given = cast("list[Message]", messages)
        try:
            ids = renderer.render_ids(given, tools=_specs(tools), add_generation_prompt=True)
            if deferring.encoded(ids) != expected:
                return False
        except (ValueError, NotImplementedError):
            return False
    return True


def _no_renderer(folder: Path) -> ConfigError:
    model_type = config_of(folder).get("model_type")
    return ConfigError(
        f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), "
        f"and there is no chat renderer for the model type {model_type!r}; add the template that the model "
        "was trained with, or name the original model in config.json as _name_or_path, one of: "
        + ", ".join(sorted(MODEL_RENDERER_MAP))
    )


def _invalid(problem: str) -> GatewayError:
    return GatewayError(400, "invalid_messages", problem, param="messages")


def _markers(tokenizer: LightTokenizer) -> Markers | None:
    names = [THINK_START, THINK_END, "<tool_call>", "</tool_call>"]
    ids = [token for token in tokenizer.convert_tokens_to_ids(names) if token is not None]
    return Markers(*ids) if len(ids) == len(names) else None


def _specs(tools: list[Tool]) -> list[ToolSpec] | None:
    return cast("list[ToolSpec]", tools) if tools else None


def _is_complete(call: ParsedToolCall) -> bool:
    return call.status is ToolCallParseStatus.OK and is_expressible(call.name, call.arguments)


def _message(content: str, reasoning: str, calls: Sequence[NamedCall], cut_at: Sequence[str]) -> ChatMessage:
    message: ChatMessage = {"role": "assistant", "content": _cut_and_stripped(content, cut_at)}
    if reasoning.strip():
        message["reasoning_content"] = _cut_and_stripped(reasoning, cut_at)
    if calls:
        message["tool_calls"] = [_openai_tool_call(name, arguments) for name, arguments in calls]
    return message


def _openai_tool_call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    if not is_encodable(text):
        text = json.dumps(arguments)
    function = {"name": name, "arguments": text}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _cut_and_stripped(text: str, stops: Sequence[str]) -> str:
    cut = _cut_at_stops(text, stops)
    return text.strip() if cut == text else cut.lstrip()


def _cut_at_stops(text: str, stops: Sequence[str]) -> str:
    found = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
