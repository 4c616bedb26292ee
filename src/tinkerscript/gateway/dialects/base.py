"""Reading requests: JSON into typed structs, with errors that name the field.

Invariant: what a request asks for is honoured or refused by name. A field that is null asks for nothing.

What replies tell of the sampled ids beyond the message: which stop string, how much was reasoning.

Server-sent events with names, which OpenAI Responses and Anthropic Messages send.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html

The `Dialect` seam: one class per wire format, over one neutral `ModelCall` and `Completion`.

A dialect reads a request and writes replies and errors. It keeps the promise that a field which we
do not honour is refused by name, and that no prompt text is ever added.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids

T = TypeVar("T")


SHOWN = 80
"""Characters of a refused value that its error repeats."""


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The request in `body`. Raises GatewayError 400 that names the field that does not fit."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explained(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(400, "invalid_json", f"the request body is not valid JSON: {error}") from error


def convert(value: Mapping[str, Any], kind: type[T], where: str) -> T:
    """A part of a request, at the place `where`, as a struct; fields that are null count as left out.

    Raises GatewayError 400 that names the field that does not fit.
    """
    given = {name: each for name, each in value.items() if each is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise explained(str(error), where) from error


def explained(text: str, where: str = "") -> GatewayError:
    """msgspec's message, such as "Expected `int`, got `str` - at `$.n`", for the caller.

    A field whose type is None is known and not honoured.
    """
    problem, _, place = text.partition(" - at ")
    inner = place.strip("`").removeprefix("$")
    place = f"{where}{inner}".removeprefix(".")
    if unknown := re.search(r"unknown field `(.+)`", problem):
        name = f"{place}.{unknown[1]}" if place else unknown[1]
        return GatewayError(
            400, "unknown_parameter", f"unknown or unsupported parameter: {name!r}", param=name
        )
    if missing := re.search(r"missing required field `(.+)`", problem):
        name = f"{place}.{missing[1]}" if place else missing[1]
        return invalid(name, f"missing required parameter: {name!r}", code="missing_required_parameter")
    if problem.startswith("Expected `null`"):
        message = f"{place} is not supported by this server; leave it out"
        return invalid(place, message, code="unsupported_parameter")
    return invalid(place or None, f"invalid value for {place or 'the request body'!r}: {problem}")


def invalid(param: str | None, message: str, *, code: str = "invalid_value") -> GatewayError:
    """A value that is not allowed."""
    return GatewayError(400, code, message, param=param)


def unsupported(param: str, value: object, remedy: str = "") -> GatewayError:
    """A value that is known and not honoured. `remedy`: what to do instead of leaving the field out."""
    shown = msgspec.json.encode(value).decode()
    message = f"{param}={shown[:SHOWN]} is not supported by this server; {remedy or f'leave {param} out'}"
    return GatewayError(400, "unsupported_parameter", message, param=param)


def refuse_unhonoured(request: object, neutral: Mapping[str, Sequence[Any]], where: str = "") -> None:
    """Raise for the first field in `neutral` whose value is neither None nor one that asks for nothing.

    A field that is a Python keyword has an underscore at the end of its name here.
    """
    for name, values in neutral.items():
        value = getattr(request, name)
        if value is not None and value not in values:
            field = name.removesuffix("_")
            raise unsupported(f"{where}.{field}" if where else field, value)


def must_call(names: Sequence[str], tools: Sequence[Tool], param: str) -> list[str]:
    """`names` as the tools of which one must be called. Raises GatewayError 400 if `tools` lack one."""
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            raise invalid(param, f"{param} names {name!r}, which is not among the tools")
    if not names:
        raise invalid(param, f"{param} demands a tool call, which needs tools")
    return list(names)


def unsupported_content(kind: object, where: str) -> GatewayError:
    """A content part that is no text."""
    message = f"content of the type {kind!r} is not supported; only text is"
    return GatewayError(400, "unsupported_content", message, param=where)


THINK_END = "</think>"
"""The marker that closes reasoning in Qwen's format and most others."""


def reasoning_tokens(tokenizer: LightTokenizer, choice: Choice) -> int:
    """How many of the sampled ids are reasoning, its markers included.

    All of them if the reasoning was cut off; 0 for a format that closes it by another marker.
    """
    marker = tokenizer.convert_tokens_to_ids(THINK_END)
    if marker is None or not choice.message.get("reasoning_content"):
        return 0
    ids = unpack_ids(choice.sampled).tolist()
    return ids.index(marker) + 1 if marker in ids else len(ids)


def matched_stop(tokenizer: LightTokenizer, choice: Choice, stops: Sequence[str]) -> str | None:
    """The stop string that ended a choice: the one that begins first in what was sampled."""
    if not stops or choice.finish_reason != "stop":
        return None
    text = tokenizer.decode(unpack_ids(choice.sampled).tolist())
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


_ENCODER = msgspec.json.Encoder()


def named_event(data: dict[str, Any]) -> bytes:
    """One event, named by its data's `type`."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(data) + b"\n\n"


FinishReason = Literal["stop", "length", "tool_calls"]


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the model, whatever format it came in. None: the caller asked for nothing.

    A dialect whose replies need more of the request than this extends it.
    """

    NAMES: ClassVar[Mapping[str, str]] = {
        "must_call": "tool_choice",
        "json_schema": "response_format",
        "parallel_tool_calls": "parallel_tool_calls",
    }
    """What the caller calls the fields that an engine may refuse."""

    model: str
    messages: list[ChatMessage]
    """At least one, normalised; none where there are `prompts`."""

    tools: list[Tool]
    parse_tool_calls: bool
    """False: tool calls that the model writes stay text."""

    prompts: list[bytes] = []
    """Prompts as ids (int32), instead of messages: each is answered by plain text, `n` times."""

    previous: str | None = None
    """Id of a call of the same claim whose conversation `messages` go on from."""

    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1
    """-1 for no limit."""

    seed: int | None = None
    stop: list[str] = []
    logprobs: bool = False
    top_logprobs: int = 0
    """How many alternatives to tell at each sampled position."""

    must_call: list[str] = []
    """Tools of which the answer must call one. Empty: the model decides."""

    parallel_tool_calls: bool = True
    """Whether one answer may call several tools."""

    json_schema: dict[str, Any] | None = None
    """JSON schema of the answer, `{"type": "object"}` for any object. Tool calls may answer instead."""

    return_token_ids: bool = False
    stream: bool = False
    """Whether the reply goes out as events while it is sampled."""

    stream_usage: bool = False
    """Whether the last event of a stream tells the usage."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer."""

    message: ChatMessage
    sampled: bytes
    """Sampled ids (int32), the stop token included."""

    logprobs: bytes
    """One float32 for each sampled id."""

    finish_reason: FinishReason
    top_ids: bytes = b""
    """The most probable ids of each position (int32 [R, call.top_logprobs]), best first."""

    top_logprobs: bytes = b""
    """float32 [R, call.top_logprobs]"""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What answers a `ModelCall`. Of several prompts the choices of the first one come first."""

    call_id: str
    """Id of the first choice's call."""

    created: int
    """Unix time in seconds."""

    model: str
    prompt: bytes
    """Prompt ids (int32), of the first prompt."""

    choices: list[Choice]
    policy_version: int


class ReplyHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a reply before anything is sampled."""

    call_id: str
    """Id of the first choice's call."""

    created: int
    """Unix time in seconds."""

    model: str
    prompt: bytes
    """Prompt ids (int32), of the first prompt."""


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one choice. Text and ids are not aligned: text may be held back a while."""

    index: int
    content: str = ""
    """Text that can no longer change: all deltas together are the message's content."""

    reasoning: str = ""
    """As `content`, for the message's reasoning."""

    sampled: bytes = b""
    """Sampled ids (int32)."""

    logprobs: bytes = b""
    """One float32 for each sampled id."""

    top_ids: bytes = b""
    """As in `Choice`, of these ids."""

    top_logprobs: bytes = b""


class EventStream(ABC):
    """One streamed reply. Each method returns the bytes to send now; there may be none."""

    @abstractmethod
    def start(self) -> bytes:
        """The events before anything is sampled."""

    @abstractmethod
    def delta(self, delta: MessageDelta) -> bytes:
        """The events for what is new of one choice."""

    @abstractmethod
    def finish(self, completion: Completion) -> bytes:
        """The last events. All content, reasoning and ids went through `delta`; the calls are recorded.

        What is left to tell: tool calls, why each choice ended, usage, and that the stream is over.
        """

    @abstractmethod
    def failure(self, error: GatewayError) -> bytes:
        """The last events after an error; nothing follows."""


class Dialect(ABC):
    """A wire format of the gateway."""

    path: str
    """Route under the gateway's prefix, such as `/chat/completions`."""

    @abstractmethod
    def parse(self, body: bytes) -> ModelCall:
        """Read a request. Raises GatewayError 400 that names the field it cannot honour."""

    @abstractmethod
    def reply(self, call: ModelCall, completion: Completion) -> bytes:
        """The body of the answer to `call`."""

    @abstractmethod
    def error(self, error: GatewayError) -> bytes:
        """The body of an error reply."""

    @abstractmethod
    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        """The events that answer `call`, which asked for a stream."""


class TokenCounter(Dialect):
    """A dialect that can also tell how many tokens a prompt has."""

    count_path: str
    """Route under the gateway's prefix."""

    @abstractmethod
    def parse_count(self, body: bytes) -> ModelCall:
        """Read a request whose prompt is to be counted. Raises GatewayError 400."""

    @abstractmethod
    def count_reply(self, tokens: int) -> bytes:
        """The body of the answer."""
