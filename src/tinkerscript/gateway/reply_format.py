"""The formats of reasoning and tool calls by model family, and the parser of a reply's text.

All else stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tinkerscript.gateway.chat_messages import Tool, is_expressible

Arguments = dict[str, Any]

NamedCall = tuple[str, Arguments]

_DECODER = json.JSONDecoder()

_SPACE = re.compile(r"\s*")

THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
)


@dataclass(frozen=True, slots=True)
class Block:
    start: int
    end: int
    calls: Sequence[NamedCall]


@dataclass(frozen=True, slots=True)
class ReadReply:
    content: Sequence[str]
    reasoning: str = ""
    calls: Sequence[NamedCall] = ()


@dataclass(frozen=True, slots=True)
class CallFormat:
    name: str
    openers: tuple[str, ...]
    # Yields complete calls, given the tools' schemas.
    blocks: Callable[[str, Mapping[str, Any]], Iterator[Block]]
    bare: str = ""  # They start a call without an opener.


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    thinking: tuple[str, str] = THINKING[0]
    prefilled: bool = False  # The prompt ends inside reasoning.
    calls: CallFormat | None = None  # None if unknown: calls stay text.
    harmony: bool = False  # Messages on channels (gpt-oss).
    # Several calls stay text.
    one_call: bool = False

    @property
    def reads_calls(self) -> bool:
        return self.harmony or self.calls is not None

    def read(self, text: str, *, tool_calls: bool, tools: Sequence[Tool] = ()) -> ReadReply:
        if self.harmony:
            return _harmony(text, tool_calls=tool_calls)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        blocks = self.calls.blocks if self.calls and tool_calls else _no_blocks
        reasoning, rest, closed = self.split_reasoning(text)
        found = None if closed else next(blocks(reasoning, schemas), None)
        if found and self.calls and reasoning.startswith(self.calls.openers, found.start):
            reasoning, rest = reasoning[: found.start], reasoning[found.start :]
        content: list[str] = []
        calls: list[NamedCall] = []
        position = 0
        for block in blocks(rest, schemas):
            content.append(rest[position : block.start])
            calls += block.calls
            position = block.end
        if self.one_call and len(calls) > 1:
            return ReadReply([rest], reasoning)
        return ReadReply([*content, rest[position:]], reasoning, calls)

    def split_reasoning(self, text: str) -> tuple[str, str, bool]:
        """Return the reasoning, the text after it, and whether reasoning has ended or is absent."""
        opener, closer = self.thinking
        body = text.lstrip()
        if body.startswith(opener):
            body = body[len(opener) :]
        elif self.prefilled:
            body = text
        else:
            return "", text, True
        reasoning, found, rest = body.partition(closer)
        return reasoning, rest, bool(found)


def reply_format(written_call: str, prompt: str, *, source: str, one_call: bool = False) -> ReplyFormat:
    """`written_call` is the template's text for a call of PROBE_TOOL."""
    if "<|channel|>" in source and "<|message|>" in source:
        return ReplyFormat(harmony=True)
    thinking = next((pair for pair in THINKING if pair[1] in source), THINKING[0])
    prefilled = prompt.rstrip().endswith(thinking[0])
    schemas = {"probe_tool": {}}
    expected = [("probe_tool", {"probe_key": "probe_value"})]
    for calls in CALL_FORMATS:
        if [call for block in calls.blocks(written_call, schemas) for call in block.calls] == expected:
            return ReplyFormat(thinking, prefilled, calls, one_call=one_call)
    return ReplyFormat(thinking, prefilled)


def _no_blocks(text: str, schemas: Mapping[str, Any]) -> Iterator[Block]:
    yield from ()


def _json_at(text: str, position: int) -> tuple[Any, int] | None:
    start = _after_space(text, position)
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _named_call(value: Any) -> NamedCall | None:
    # Most families write `name` and `arguments`, Llama `parameters`.
    if not isinstance(value, dict):
        return None
    data = cast("dict[str, Any]", value)
    name = data.get("name")
    arguments = data.get("arguments", data.get("parameters", {}))
    return (cast("str", name), arguments) if is_expressible(name, arguments) else None


def _tagged_json(text: str, schemas: Mapping[str, Any]) -> Iterator[Block]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen, SmolLM)."""
    position = 0
    while (start := text.find("<tool_call>", position)) >= 0:
        position = start + 1
        value = _json_at(text, start + len("<tool_call>"))
        end = _after_space(text, value[1]) if value else 0
        if value and text.startswith("</tool_call>", end) and (call := _named_call(value[0])):
            position = end + len("</tool_call>")
            yield Block(start, position, [call])


_GLM_NAME = re.compile(r"<tool_call>\s*([^\s<]+)")
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>((?:(?!<arg_key>).)*?)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL
)


def _tagged_arguments(text: str, schemas: Mapping[str, Any]) -> Iterator[Block]:
    """`<tool_call>name`, then pairs of `<arg_key>` and `<arg_value>` (GLM)."""
    position = 0
    while found := _GLM_NAME.search(text, position):
        name, end, position = found[1], found.end(), found.end()
        types, arguments = _types(schemas.get(name)), dict[str, Any]()
        while argument := _GLM_ARGUMENT.match(text, end):
            key, end = argument[1].strip(), argument.end()
            arguments[key] = _typed(argument[2], types.get(key))
        end = _after_space(text, end)
        if text.startswith("</tool_call>", end) and is_expressible(name, arguments):
            position = end + len("</tool_call>")
            yield Block(found.start(), position, [(name, arguments)])


def _types(schema: Any) -> dict[str, Any]:
    properties = cast("dict[str, Any]", schema).get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    each = cast("dict[str, Any]", properties).items()
    return {key: cast("Any", value).get("type") for key, value in each if isinstance(value, dict)}


def _typed(text: str, declared: Any) -> Any:
    if declared == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _whole_json(text: str, schemas: Mapping[str, Any]) -> Iterator[Block]:
    """JSON calls separated by `;`, as the whole reply or after `<|python_tag|>` (Llama 3)."""
    start = max(text.find("<|python_tag|>"), 0)
    position = start + len("<|python_tag|>") if text.startswith("<|python_tag|>", start) else start
    calls: list[NamedCall] = []
    while (value := _json_at(text, position)) and (call := _llama_call(value[0])):
        calls.append(call)
        position = _after_space(text, value[1])
        if not text.startswith(";", position):
            break
        position = _after_space(text, position + 1)
    if calls and position == len(text):
        yield Block(start, position, calls)


def _llama_call(value: Any) -> NamedCall | None:
    # Without parameters it is an answer.
    return _named_call(value) if isinstance(value, dict) and {"parameters", "arguments"} & {*value} else None


_MISTRAL_CALL = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")


def _bracketed(text: str, schemas: Mapping[str, Any]) -> Iterator[Block]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name[ARGS]{...}` (Mistral)."""
    position = 0
    while (start := text.find("[TOOL_CALLS]", position)) >= 0:
        position = start + 1
        if found := _MISTRAL_CALL.match(text, start):
            value = _json_at(text, found.end())
            calls = [(found[1], value[0])] if value and is_expressible(found[1], value[0]) else []
        else:
            value = _json_at(text, start + len("[TOOL_CALLS]"))
            given: list[Any] = cast("list[Any]", value[0]) if value and isinstance(value[0], list) else []
            named = [_named_call(each) for each in given]
            calls = [call for call in named if call] if all(named) else []
        if value and calls:
            position = value[1]
            yield Block(start, position, calls)


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>"
    r"(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n((?:(?!<｜tool▁call).)*?)\n```"
    r"|([^\n<]+)<｜tool▁sep｜>((?:(?!<｜tool▁call).)*?))"
    r"\s*<｜tool▁call▁end｜>",
    re.DOTALL,
)


def _deepseek(text: str, schemas: Mapping[str, Any]) -> Iterator[Block]:
    """Between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>` (DeepSeek V3, R1 and V3.1)."""
    opener, closer = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    position = 0
    while (start := text.find(opener, position)) >= 0:
        position, end = start + 1, start + len(opener)
        calls: list[NamedCall] = []
        while found := _DEEPSEEK_CALL.match(text, end):
            name, value = found[1] or found[3], _json_object(found[2] or found[4])
            if not is_expressible(name.strip(), value):
                break
            calls.append((name.strip(), cast("Arguments", value)))
            end = found.end()
        after = _after_space(text, end)
        if calls and text.startswith(closer, after):
            position = after + len(closer)
            yield Block(start, position, calls)


def _json_object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


_HERMES = CallFormat("hermes", ("<tool_call>",), _tagged_json)

QWEN3 = ReplyFormat(calls=_HERMES)

CALL_FORMATS = (
    CallFormat("deepseek", ("<｜tool▁calls▁begin｜>",), _deepseek),
    CallFormat("mistral", ("[TOOL_CALLS]",), _bracketed),
    _HERMES,
    CallFormat("glm", ("<tool_call>",), _tagged_arguments),
    CallFormat("llama3", ("<|python_tag|>",), _whole_json, bare="{"),
)


_HARMONY_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?((?:(?!<\|(?:start|message|end|call)\|>)[^\n])*)<\|message\|>"
)
_HARMONY_END = re.compile(r"<\|end\|>|<\|call\|>|(?=<\|start\|>)|\Z")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


def _harmony(text: str, *, tool_calls: bool) -> ReadReply:
    """`analysis` is reasoning, messages to functions are calls.

    Source: https://cookbook.openai.com/articles/openai-harmony
    """
    content, reasoning, calls, position = list[str](), list[str](), list[NamedCall](), 0
    while position < len(text):
        header = _HARMONY_HEADER.match(text, position)
        end = _HARMONY_END.search(text, header.end() if header else position + 1)
        assert end is not None  # \Z matches.
        whole, body = text[position : end.end()], text[header.end() if header else position : end.start()]
        position = end.end()
        channel = _CHANNEL.search(header[1]) if header else None
        recipient = _RECIPIENT.search(header[1]) if header else None
        arguments = _json_object(body) if recipient and tool_calls else None
        if recipient and is_expressible(recipient[1], arguments):
            calls.append((recipient[1], cast("Arguments", arguments)))
        elif channel and not recipient and channel[1] == "analysis":
            reasoning.append(body.strip())
        elif channel and not recipient and channel[1] in ("final", "commentary"):
            content.append(body)
        else:
            content.append(whole)
    return ReadReply(content, "\n".join(reasoning), calls)
