"""Messages to token ids and back, with the chat renderer that fits the model folder.

Invariant: `extend` returns ids that follow the sampled ids exactly as they were sampled; what was sampled is
never rendered again from text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from renderers.base import (
    MODEL_RENDERER_MAP,
    Message,
    MultimodalRenderer,
    ParsedResponse,
    ParsedToolCall,
    Renderer,
    ToolCallParseStatus,
    ToolSpec,
    create_renderer,
)
from renderers.configs import AutoRendererConfig, Qwen3RendererConfig, RendererConfig
from renderers.qwen3 import Qwen3Renderer

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.partial_message import (
    Markers,
    PartialMessage,
    PartialText,
    cut_and_stripped,
    cut_at_stops,
)
from tinkerscript.gateway.tokenizer import ESCAPED_MARK, THINK_END, THINK_START, LightTokenizer
from tinkerscript.model_folder import context_of, read_json

QWEN3_TYPES = frozenset({"qwen3", "qwen3_moe"})


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How sampled ids become a message."""

    tool_calls: bool
    """Whether tool calls are parsed; if not, their markup stays in the content."""

    cut_at: Sequence[str] = ()
    """Stop strings at which the text is cut. The ids stay as they were sampled."""


class ChatRenderer:
    """Renders, extends and parses the conversations of one model."""

    def __init__(self, folder: Path) -> None:
        """Choose the renderer for `folder` by its config.json.

        Raises ConfigError for a folder that cannot be read, or a model type without a renderer.
        """
        config = read_json(folder / "config.json")
        renderer_config, name = _choose(config, folder)
        self.tokenizer = LightTokenizer(folder, name=name)
        self._renderer = _create(self.tokenizer, renderer_config, folder)
        self.markers = _markers(self.tokenizer) if isinstance(self._renderer, Qwen3Renderer) else None
        """Ids of the markers, which partial messages and grammars need; None if unknown for this format."""

        self.max_context = context_of(folder)
        """Maximum length of prompt and reply together, in tokens."""

        self.stop_token_ids: list[int] = list(self._renderer.get_stop_token_ids())
        """Ids that end an assistant turn."""

    def render(self, messages: list[ChatMessage], tools: list[Tool]) -> list[int]:
        """Prompt ids [P] of a whole conversation, up to and including the assistant's header.

        Raises GatewayError 400 for messages that the model's chat format cannot express.
        """
        escaper = self.tokenizer.escaper
        given, specs = escaper.messages(messages), escaper.marked(tools, tools)
        try:
            ids = self._renderer.render_ids(
                cast("list[Message]", given), tools=_specs(specs), add_generation_prompt=True
            )
        except ValueError as error:
            raise GatewayError(
                400, "invalid_messages", f"the messages cannot be rendered: {error}", param="messages"
            ) from error
        if given is not messages or specs is not tools:
            self._check_marks(ids)
        return ids

    def extend(
        self, tail: list[int], sampled: list[int], messages: list[ChatMessage], tools: list[Tool]
    ) -> list[int] | None:
        """Ids to append to `tail + sampled` so that the assistant replies to `messages` next.

        `tail` is the prompt of the last turn alone, so the cost does not grow with the turns before it. None
        if the chat format cannot continue from there.
        """
        given = self.tokenizer.escaper.messages(messages)
        new_ids = self._bridge(tail, sampled, given, tools)
        if new_ids is None and self._ends_in_reasoning(sampled):
            # Renderers refuse a turn that they could not render themselves. What follows a turn depends only
            # on how it ends, and nothing is rendered again here.
            new_ids = self._bridge(tail, sampled[-1:], given, tools)
        if new_ids is not None and given is not messages:
            self._check_marks(new_ids)
        return new_ids

    def _bridge(
        self, tail: list[int], sampled: list[int], messages: list[ChatMessage], tools: list[Tool]
    ) -> list[int] | None:
        before = tail + sampled
        bridged = self._renderer.bridge_to_next_turn(
            tail, sampled, cast("list[Message]", messages), tools=_specs(tools)
        )
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return bridged.token_ids[len(before) :]

    def _ends_in_reasoning(self, sampled: list[int]) -> bool:
        """Whether the turn ended inside its reasoning."""
        start, end = self.tokenizer.convert_tokens_to_ids([THINK_START, THINK_END])
        ended = bool(sampled) and sampled[-1] in self.stop_token_ids
        return ended and start in sampled and end not in sampled

    def _check_marks(self, ids: list[int]) -> None:
        """Raise GatewayError 400 if the renderer escaped a mark, which cannot be undone."""
        if ESCAPED_MARK in self.tokenizer.decode(ids):
            message = (
                "this model's chat format cannot write special tokens as text; remove them from the messages"
            )
            raise GatewayError(400, "invalid_messages", message, param="messages")

    def parse(self, sampled: list[int], options: ParseOptions) -> ChatMessage:
        """The assistant message in `sampled` [R]; no sampled text is lost.

        Malformed tool calls, and text between tool calls, stay in the content.
        """
        ids = self._before_stop(sampled)
        parsed = self._renderer.parse_response(sampled)
        calls = [call for call in parsed.tool_calls if options.tool_calls and _is_complete(call)]
        content = self._content(ids, parsed, calls)
        message: ChatMessage = {"role": "assistant", "content": cut_and_stripped(content, options.cut_at)}
        if reasoning := (parsed.reasoning_content or "").strip():
            opened = self.tokenizer.decode(ids).partition(THINK_START)
            spaced = _with_outer_space(reasoning, opened[2] or opened[0])
            message["reasoning_content"] = cut_and_stripped(spaced, options.cut_at)
        if calls:
            message["tool_calls"] = [_openai_tool_call(call) for call in calls]
        return message

    def partial(self, options: ParseOptions) -> PartialMessage:
        """Text of a message while it is sampled, a prefix of what `parse` will return."""
        return PartialMessage(
            self.tokenizer.token_bytes,
            self.markers,
            stop_ids=self.stop_token_ids,
            tool_calls=options.tool_calls,
            cut_at=options.cut_at,
        )

    def text(self, sampled: list[int], cut_at: Sequence[str]) -> str:
        """The plain text of `sampled` [R], with white space and markers as they are."""
        return cut_at_stops(self.tokenizer.decode(self._before_stop(sampled)), cut_at)

    def partial_text(self, cut_at: Sequence[str]) -> PartialText:
        """Text while it is sampled, a prefix of what `text` will return."""
        return PartialText(self.tokenizer.token_bytes, stop_ids=self.stop_token_ids, cut_at=cut_at)

    def _before_stop(self, sampled: list[int]) -> list[int]:
        end = next((index for index, token in enumerate(sampled) if token in self.stop_token_ids), None)
        return sampled[:end]

    def _content(self, ids: list[int], parsed: ParsedResponse, calls: list[ParsedToolCall]) -> str:
        """The text outside `calls`, with the white space around it.

        Renderers return only the text before the first attempted call, and strip it.
        """
        spans = [attempt.token_span for attempt in parsed.tool_calls if attempt.token_span is not None]
        position = spans[0][0] if spans else len(ids)
        parts = [_with_outer_space(parsed.content, self.tokenizer.decode(ids[:position]), last=True)]
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


def _choose(config: dict[str, Any], folder: Path) -> tuple[RendererConfig, str | None]:
    """The renderer's config, and the public model name that it needs, if it does."""
    model_type = config.get("model_type")
    if model_type in QWEN3_TYPES:
        # "all": reasoning stays in the history, so that each turn extends the last.
        return Qwen3RendererConfig(thinking_retention="all"), None
    name = config.get("_name_or_path")
    if isinstance(name, str) and name in MODEL_RENDERER_MAP:
        return AutoRendererConfig(thinking_retention="all"), name
    raise ConfigError(
        f"no chat renderer for the model type {model_type!r} of {folder}; use a Qwen3 model, or name the "
        "original model in config.json as _name_or_path, one of: " + ", ".join(sorted(MODEL_RENDERER_MAP))
    )


def _create(tokenizer: LightTokenizer, config: RendererConfig, folder: Path) -> Renderer:
    try:
        renderer = create_renderer(tokenizer, config)
    except (AssertionError, ImportError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"the chat renderer does not fit the model in {folder}: {error}") from error
    if isinstance(renderer, MultimodalRenderer):
        raise ConfigError(f"{folder} is a multimodal model; only text models are supported")
    return renderer


def _markers(tokenizer: LightTokenizer) -> Markers | None:
    names = ["<|im_start|>", THINK_START, THINK_END, "<tool_call>", "</tool_call>"]
    ids = [token for token in tokenizer.convert_tokens_to_ids(names) if token is not None]
    return Markers(*ids) if len(ids) == len(names) else None


def _specs(tools: list[Tool]) -> list[ToolSpec] | None:
    return cast("list[ToolSpec]", tools) if tools else None


def _is_complete(call: ParsedToolCall) -> bool:
    """Whether OpenAI's form can express this attempt: a name, and a JSON object of arguments."""
    # A model may sample any JSON value for either, despite the parser's annotations.
    name, arguments = cast("Any", call.name), cast("Any", call.arguments)
    if call.status is not ToolCallParseStatus.OK or not isinstance(name, str):
        return False
    return bool(name) and _is_encodable(name) and isinstance(arguments, dict) and _is_finite(arguments)


def _openai_tool_call(call: ParsedToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    if not _is_encodable(arguments):
        arguments = json.dumps(call.arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def _is_finite(arguments: object) -> bool:
    """Whether JSON can express every number: Python parses `NaN`, and 1e999 as infinity."""
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return False
    return True


def _is_encodable(text: str) -> bool:
    """Whether `text` has no lone surrogates, which JSON escapes can produce."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _with_outer_space(text: str, whole: str, *, last: bool = False) -> str:
    """`text`, which was stripped, with the white space that is around it in `whole`."""
    text = text.strip()
    start = whole.rfind(text) if last else whole.find(text)
    if start < 0 or not text:
        return text
    before, after = whole[:start], whole[start + len(text) :]
    return before[len(before.rstrip()) :] + text + after[: len(after) - len(after.lstrip())]


def joined_parts(parts: Sequence[str]) -> str:
    """Texts with only white space between what they came from, a line each, with the outer white space."""
    parts = [part for part in parts if part.strip()]
    if not parts:
        return ""
    first, last = parts[0], parts[-1]
    lead, trail = first[: len(first) - len(first.lstrip())], last[len(last.rstrip()) :]
    return lead + "\n".join(part.strip() for part in parts) + trail
