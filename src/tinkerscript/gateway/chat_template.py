"""`ChatTemplate` renders a model's Jinja chat template as transformers does, without importing it.

The environment copies `transformers.utils.chat_template_utils` (5.5), and a test compares the two. Probes
show which messages a template accepts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool, images_of
from tinkerscript.model_folder import read_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")

_FIELDS = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"})

_IMAGE = "\ufdd1"

PROBE_TOOL_NAME = "probe_tool"

PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL_NAME,
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "Key."}},
            "required": ["probe_key"],
        },
    },
}

PROBE_ARGUMENTS = {"probe_key": "probe_value"}

_PROBE_ID = "call_0123456789abcdef01234567"

PROBE_CALL: list[ChatMessage] = [
    {"role": "user", "content": "probe_question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": _PROBE_ID,
                "type": "function",
                "function": {"name": "probe_tool", "arguments": json.dumps(PROBE_ARGUMENTS)},
            }
        ],
    },
    {"role": "tool", "tool_call_id": _PROBE_ID, "content": "probe_result"},
]


# For templates without tools, in Qwen's and Hermes' words.
TOOLS_IN_PROMPT = """\
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


@dataclass(frozen=True, slots=True)
class MessageForm:
    empty_content: str | None = ""  # For messages with only tool calls.
    parsed_arguments: bool = True  # An object rather than JSON text.
    short_ids: bool = False  # Nine letters or digits (Mistral).
    tools_in: str = ""  # The role that declares tools as text.
    in_parts: bool = False

    def of(self, message: ChatMessage) -> dict[str, Any]:
        given = {name: value for name, value in message.items() if name in _FIELDS}
        if self.in_parts or "images" in message:
            given["content"] = _parts(given["content"] or "", bool(message.get("images")))
        if "reasoning_content" in given and not (given["content"] and given.get("tool_calls")):
            # gpt-oss's name; refused with text and calls.
            given["thinking"] = given["reasoning_content"]
        if self.short_ids and given.get("tool_call_id"):
            given["tool_call_id"] = _short_id(given["tool_call_id"])
        if calls := given.get("tool_calls"):
            given["tool_calls"] = [self._call(call) for call in calls]
            given["content"] = given["content"] or self.empty_content
        return given

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = (
            parsed_arguments(function["arguments"]) if self.parsed_arguments else function["arguments"]
        )
        call_id = _short_id(call["id"]) if self.short_ids and call.get("id") else call.get("id")
        return {**call, "id": call_id, "function": {**function, "arguments": arguments}}


class ChatTemplate:
    def __init__(
        self,
        templates: Mapping[str, str],
        tokens: Mapping[str, str],
        *,
        origin: str,
        clock: Callable[[], datetime] = datetime.now,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`templates`: `default`, and perhaps `tool_use` for requests with tools."""
        if "default" not in templates:
            names = ", ".join(sorted(templates))
            raise ConfigError(f"{origin} has chat templates, and none is called `default`: {names}")
        try:
            self._templates = {name: _environment().from_string(text) for name, text in templates.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {origin} cannot be compiled: {error}") from error
        self.source = "".join(templates.values())
        self._tokens = dict(tokens)
        self._clock = clock
        self._kwargs = dict(kwargs or {})
        _check_kwargs(self._kwargs, self.source, origin)
        self.form = MessageForm()
        self.form = self._find_form()

    @classmethod
    def of(cls, folder: Path, kwargs: Mapping[str, Any] | None = None) -> ChatTemplate | None:
        templates = _templates_of(folder)
        return cls(templates, _tokens_of(folder), origin=str(folder), kwargs=kwargs) if templates else None

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        *,
        generation: bool,
        now: datetime | None = None,
    ) -> str:
        """`generation` adds the header of the next reply. Raises GatewayError 400."""
        try:
            return self._rendered(messages, tools, generation, self.form, now or self._clock())
        except _REFUSALS as error:
            message = f"the model's chat template cannot render the messages: {error}"
            raise GatewayError(400, "invalid_messages", message, param="messages") from error

    def now(self) -> datetime:
        return self._clock()

    def _rendered(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        generation: bool,
        form: MessageForm,
        now: datetime,
    ) -> str:
        if form.tools_in:
            messages, tools = _as_text(messages, tools, form.tools_in), []
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        return self._templates[name].render(
            messages=[form.of(message) for message in messages],
            tools=list(tools) or None,
            documents=None,
            add_generation_prompt=generation,
            strftime_now=now.strftime,
            **self._tokens,
            **self._kwargs,
        )

    def _find_form(self) -> MessageForm:
        parts = MessageForm(in_parts=True)
        shown = ["probe_question" in self._probed(PROBE_CALL[:1], form) for form in (self.form, parts)]
        plain = parts if shown == [False, True] else self.form
        if self._writes_tools(plain):
            for content, parsed, short in product(("", None), (True, False), (False, True)):
                form = replace(plain, empty_content=content, parsed_arguments=parsed, short_ids=short)
                written = self._probed(PROBE_CALL, form)
                if "probe_value" in written and "probe_result" in written:
                    return form
            return plain
        for role in ("system", "user"):
            form = replace(plain, tools_in=role)
            if "probe_key" in self._probed(PROBE_CALL, form):
                return form
        return plain

    def _writes_tools(self, form: MessageForm) -> bool:
        system: ChatMessage = {"role": "system", "content": "probe_system"}
        conversations = (PROBE_CALL[:1], [system, *PROBE_CALL[:1]])
        return any(PROBE_TOOL_NAME in self._probed(messages, form) for messages in conversations)

    def _probed(self, messages: Sequence[ChatMessage], form: MessageForm) -> str:
        try:
            return self._rendered(messages, [PROBE_TOOL], True, form, self._clock())
        except _REFUSALS:
            return ""


_REFUSALS = (
    jinja2.TemplateError,
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError),
)


def with_image_places(message: ChatMessage) -> ChatMessage:
    """Write a character for each image into the content, because marks in the text move what follows.

    Raises GatewayError 400 if the content has the character.
    """
    images, content = images_of(message), message["content"]
    if not images:
        return message
    if _IMAGE in content:
        problem = "a message with images must not contain U+FDD1; remove it"
        raise GatewayError(400, "invalid_messages", problem, param="messages")
    ends = [*(image["at"] for image in images), len(content)]
    texts = [content[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    return {**message, "content": _IMAGE.join(texts)}


def _parts(content: str, has_images: bool) -> list[dict[str, str]]:
    if not has_images:
        return [{"type": "text", "text": content}]
    parts: list[dict[str, str]] = []
    for text in content.split(_IMAGE):
        parts += [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return parts[1:]


def _as_text(messages: Sequence[ChatMessage], tools: Sequence[Tool], role: str) -> list[ChatMessage]:
    written: list[ChatMessage] = []
    for number, message in enumerate(messages):
        text = message.get("content") or ""
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if number and messages[number - 1]["role"] == "tool":
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
            continue
        calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        written.append({**plain, "content": "\n".join(filter(None, [text, *calls]))} if calls else plain)
    if not tools:
        return written
    declared = TOOLS_IN_PROMPT.format("\n".join(_to_json(tool) for tool in tools))
    place = next((at for at, message in enumerate(written) if message["role"] == role), None)
    if place is None or (role == "system" and place > 0):
        return [{"role": role, "content": declared}, *written]
    texts = (
        (written[place]["content"], declared) if role == "system" else (declared, written[place]["content"])
    )
    written[place] = {**written[place], "content": "\n\n".join(texts)}
    return written


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": parsed_arguments(function["arguments"])}
    return f"<tool_call>\n{_to_json(call)}\n</tool_call>"


def templates_with_defaults(folder: Path, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the template files by name, with `kwargs` as defaults.

    With them, a checkpoint prompts as in training wherever it is served.
    """
    if not kwargs:
        return {}
    defaults = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in kwargs.items()
    )
    # `{{ '' }}` keeps a newline at the template's start.
    texts = {name: defaults + "{{ '' }}" + text for name, text in _templates_of(folder).items()}
    return {
        "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja": text
        for name, text in texts.items()
    }


def _check_kwargs(kwargs: Mapping[str, Any], source: str, origin: str) -> None:
    if not kwargs:
        return
    parsed = _environment().parse(source)
    known = jinja2.meta.find_undeclared_variables(parsed)
    known -= {*_GIVEN, *_SPECIAL_TOKENS, *_environment().globals}
    if unknown := sorted(set(kwargs) - known):
        assigned = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
        tested = {test.node.name for test in parsed.find_all(nodes.Test) if isinstance(test.node, nodes.Name)}
        names = ", ".join(sorted(known - (assigned - tested))) or "none"
        raise ConfigError(
            f"engine.chat_template_kwargs: the chat template of {origin} has no argument {unknown[0]!r}; "
            f"its arguments are: {names}"
        )


def _templates_of(folder: Path) -> dict[str, str]:
    # As in transformers, files override tokenizer_config.json.
    found = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = folder / "chat_template.jinja"
    if found:
        return {name: _read(path) for name, path in found.items()}
    declared: Any = read_json(folder / "tokenizer_config.json").get("chat_template")
    declared = declared or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(declared, list):
        return {each["name"]: each["template"] for each in cast("list[dict[str, str]]", declared)}
    return {"default": declared} if isinstance(declared, str) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _tokens_of(folder: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        data = read_json(folder / name)
        for key in _SPECIAL_TOKENS:
            value: Any = data.get(key)
            value = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[key] = value
    return tokens


def parsed_arguments(arguments: str) -> Any:
    try:
        value: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return cast("dict[str, Any]", value) if isinstance(value, dict) else arguments


def _short_id(call_id: str) -> str:
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012, as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = environment.globals
    functions["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
