"""OpenAI chat completions.

Owns the reading of requests and the shape of replies and errors. Our extensions: `top_k` and
`return_token_ids` in the request; `token_ids` on a choice, `prompt_token_ids` on the reply and
`token_id` on a logprob entry, all three only when asked for. `developer` messages are system messages.
A tool's `strict` is accepted and not enforced: arguments are what the model sampled.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.base import (
    Choice,
    Completion,
    Dialect,
    EventStream,
    ModelCall,
    ReplyHeader,
)
from tinkerscript.gateway.dialects.chat_events import (
    ChatCompletionEvents,
    error_body,
    fingerprint_of,
    logprob_entries,
    usage_of,
)
from tinkerscript.gateway.messages import ChatMessage, Tool
from tinkerscript.gateway.tokenizer import LightTokenizer
from tinkerscript.rollouts.call import unpack_ids

MAX_CHOICES = 128
MAX_STOPS = 16

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "verbosity": (),
}
"""Fields that are known and not honoured, with the values that ask for nothing. None always does."""


class _Function(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = ""


class _ToolCall(Struct, forbid_unknown_fields=True):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class _ToolFunction(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, forbid_unknown_fields=True):
    function: _ToolFunction
    type: Literal["function"] = "function"


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(Struct, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Accepted, of no consequence here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known and not honoured: see _NEUTRAL.
    frequency_penalty: Any = None
    logit_bias: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    presence_penalty: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    top_logprobs: Any = None
    verbosity: Any = None


_DECODER = msgspec.json.Decoder(_Request)
_ENCODER = msgspec.json.Encoder()


class ChatCompletions(Dialect):
    """`POST /chat/completions`."""

    path = "/chat/completions"

    def __init__(self, tokenizer: LightTokenizer) -> None:
        """`tokenizer` gives the text and bytes of single tokens for `logprobs`."""
        self._tokenizer = tokenizer

    def parse(self, body: bytes) -> ModelCall:
        request = _decode(body)
        _refuse_unhonoured(request)
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stop) > MAX_STOPS or not all(stop):
            raise _invalid("stop", f"stop must be at most {MAX_STOPS} strings, none of them empty")
        return ModelCall(
            model=request.model,
            messages=[_normalised(message, index) for index, message in enumerate(request.messages)],
            tools=[_neutral_tool(tool.function) for tool in request.tools or ()],
            parse_tool_calls=_parses_tool_calls(request),
            n=request.n or 1,
            max_tokens=_max_tokens(request),
            temperature=request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or -1,
            seed=request.seed,
            stop=stop,
            logprobs=bool(request.logprobs),
            return_token_ids=bool(request.return_token_ids),
            stream=bool(request.stream),
            stream_usage=_stream_usage(request),
        )

    def reply(self, call: ModelCall, completion: Completion) -> bytes:
        choices = [self._choice(call, choice, index) for index, choice in enumerate(completion.choices)]
        reply: dict[str, Any] = {
            "id": f"chatcmpl-{completion.call_id}",
            "object": "chat.completion",
            "created": completion.created,
            "model": completion.model,
            "system_fingerprint": fingerprint_of(completion),
            "choices": choices,
            "usage": usage_of(completion),
        }
        if call.return_token_ids:
            reply["prompt_token_ids"] = unpack_ids(completion.prompt).tolist()
        return _ENCODER.encode(reply)

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return ChatCompletionEvents(self._tokenizer, call, header)

    def error(self, error: GatewayError) -> bytes:
        return _ENCODER.encode(error_body(error))

    def _choice(self, call: ModelCall, choice: Choice, index: int) -> dict[str, Any]:
        message = choice.message
        if not message["content"] and message.get("tool_calls"):
            message = {**message, "content": None}
        built: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if call.logprobs:
            entries = logprob_entries(
                self._tokenizer, choice.sampled, choice.logprobs, token_ids=call.return_token_ids
            )
            built["logprobs"] = {"content": entries, "refusal": None}
        if call.return_token_ids:
            built["token_ids"] = unpack_ids(choice.sampled).tolist()
        return built


def _decode(body: bytes) -> _Request:
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(400, "invalid_json", f"the request body is not valid JSON: {error}") from error


def _explained(text: str) -> GatewayError:
    """msgspec's message, such as "Expected `int`, got `str` - at `$.n`", in OpenAI's terms."""
    problem, _, place = text.partition(" - at ")
    where = place.strip("`").removeprefix("$").removeprefix(".")
    if unknown := re.search(r"unknown field `(.+)`", problem):
        name = f"{where}.{unknown[1]}" if where else unknown[1]
        return GatewayError(
            400, "unknown_parameter", f"unknown or unsupported parameter: {name!r}", param=name
        )
    if missing := re.search(r"missing required field `(.+)`", problem):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return _invalid(name, f"missing required parameter: {name!r}", code="missing_required_parameter")
    return _invalid(where or None, f"invalid value for {where or 'the request body'!r}: {problem}")


def _invalid(param: str | None, message: str, *, code: str = "invalid_value") -> GatewayError:
    return GatewayError(400, code, message, param=param)


def _refuse_unhonoured(request: _Request) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            shown = msgspec.json.encode(value).decode()
            message = f"{name}={shown[:80]} is not supported by this server; leave {name} out"
            raise GatewayError(400, "unsupported_parameter", message, param=name)


def _parses_tool_calls(request: _Request) -> bool:
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        shown = msgspec.json.encode(choice).decode()
        message = f"tool_choice={shown[:80]} is not supported by this server; use 'auto' or 'none'"
        raise GatewayError(400, "unsupported_parameter", message, param="tool_choice")
    return bool(request.tools) and choice != "none"


def _stream_usage(request: _Request) -> bool:
    if request.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "stream_options is only allowed with stream=true")
    return bool(request.stream_options and request.stream_options.include_usage)


def _max_tokens(request: _Request) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise _invalid("max_tokens", f"max_tokens={old} contradicts max_completion_tokens={new}")
    return old if new is None else new


def _neutral_tool(function: _ToolFunction) -> Tool:
    neutral: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        neutral["description"] = function.description
    if function.parameters is not None:
        neutral["parameters"] = function.parameters
    return {"type": "function", "function": neutral}


def _normalised(message: _Message, index: int) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    if message.content is None and role != "assistant":
        raise _invalid(f"messages[{index}].content", f"a message of the role {role!r} needs content")
    normal: ChatMessage = {"role": role, "content": _text(message.content, index)}
    if message.name:
        normal["name"] = message.name
    if role == "assistant":
        _add_assistant_fields(normal, message)
    elif message.tool_calls:
        raise _invalid(f"messages[{index}].tool_calls", f"a message of the role {role!r} has no tool_calls")
    if role == "tool":
        if not message.tool_call_id:
            raise _invalid(f"messages[{index}].tool_call_id", "a tool message needs a tool_call_id")
        normal["tool_call_id"] = message.tool_call_id
    return normal


def _add_assistant_fields(normal: ChatMessage, message: _Message) -> None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        normal["reasoning_content"] = reasoning
    if message.tool_calls:
        normal["tool_calls"] = [
            {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
            for call in message.tool_calls
        ]


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    """The text of a message: parts are joined as they are."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for place, part in enumerate(content):
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise GatewayError(
                400,
                "unsupported_content",
                f"content parts of the type {part.get('type')!r} are not supported; only text is",
                param=f"messages[{index}].content[{place}]",
            )
        texts.append(text)
    return "".join(texts)
