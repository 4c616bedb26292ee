"""OpenAI Responses.

Owns the reading of requests. Our extensions: `top_k` and `return_token_ids` in the request;
`prompt_token_ids` and `token_ids` on the response, and `token_id` on a logprob entry, only when asked for.

`previous_response_id` goes on from a response of the same claim, also after a restart and whatever `store`
said: a claim's calls are kept. As at OpenAI, the instructions of that response are left out and its tools
have to be sent again. `include` knows `message.output_text.logprobs` (one entry for each sampled id, on the
text part) and `reasoning.encrypted_content` (the reasoning in base64; it stands in clear beside it). Accepted
and of no consequence: `store`, `metadata`, a function's `strict`, and the fields about caches and users.

Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import Tool
from tinkerscript.gateway.dialects.base import (
    Completion,
    EventStream,
    ModelCall,
    ReplyHeader,
    TokenCounter,
    decode,
    invalid,
    must_call,
    refuse_unhonoured,
    unsupported,
)
from tinkerscript.gateway.dialects.chat_events import error_body
from tinkerscript.gateway.dialects.responses_events import ResponseEvents
from tinkerscript.gateway.dialects.responses_input import neutral_tools, normalised
from tinkerscript.gateway.dialects.responses_output import RESPONSE_PREFIX, ResponsesCall, ResponseWriter
from tinkerscript.gateway.tokenizer import LightTokenizer

MAX_TOP_LOGPROBS = 20

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "truncation": ("disabled",),
}
"""Fields that are known and not honoured, with the values that ask for nothing. None always does."""


class _Format(Struct, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class _Text(Struct, forbid_unknown_fields=True):
    format: _Format | None = None
    verbosity: None = None


class _Reasoning(Struct, forbid_unknown_fields=True):
    """How much to reason and what to tell of it: not ours to choose."""

    context: None = None
    effort: None = None
    generate_summary: None = None
    mode: None = None
    summary: None = None


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class _Prompt(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both a response and its count are asked for with."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    # Known and not honoured: see _NEUTRAL.
    conversation: Any = None
    truncation: Any = None


class _Request(_Prompt, kw_only=True):
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    # Accepted, of no consequence here.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    user: str | None = None
    # Known and not honoured: see _NEUTRAL.
    access_programs: Any = None
    background: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    service_tier: Any = None


_PLAIN = {"type": "text"}

_REQUEST = msgspec.json.Decoder(_Request)
_PROMPT = msgspec.json.Decoder(_Prompt)
_ENCODER = msgspec.json.Encoder()


class Responses(TokenCounter):
    """OpenAI's `POST /responses`."""

    path = "/responses"
    count_path = "/responses/input_tokens"

    def __init__(self, tokenizer: LightTokenizer) -> None:
        """`tokenizer` gives the text of single tokens for logprobs, and finds the end of reasoning."""
        self._tokenizer = tokenizer

    def parse(self, body: bytes) -> ModelCall:
        request = decode(_REQUEST, body)
        _refuse(request)
        include = _include(request.include or ())
        return ResponsesCall(
            model=request.model,
            previous=_previous(request.previous_response_id),
            messages=normalised(request.input, request.instructions),
            tools=(tools := neutral_tools(request.tools or ())),
            parse_tool_calls=_parses_tool_calls(request),
            must_call=_must_call(request.tool_choice, tools),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            json_schema=_json_schema(request.text),
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or -1,
            logprobs=_LOGPROBS in include,
            top_logprobs=_top_logprobs(request.top_logprobs, include),
            return_token_ids=bool(request.return_token_ids),
            stream=bool(request.stream),
            encrypted_reasoning=_ENCRYPTED in include,
            echo=_echo(request),
        )

    def parse_count(self, body: bytes) -> ModelCall:
        prompt = decode(_PROMPT, body)
        _refuse(prompt)
        return ResponsesCall(
            model=prompt.model,
            previous=_previous(prompt.previous_response_id),
            messages=normalised(prompt.input, prompt.instructions),
            tools=neutral_tools(prompt.tools or ()),
            parse_tool_calls=_parses_tool_calls(prompt),
        )

    def count_reply(self, tokens: int) -> bytes:
        return _ENCODER.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def reply(self, call: ModelCall, completion: Completion) -> bytes:
        return _ENCODER.encode(ResponseWriter(self._tokenizer, _own(call)).whole(completion))

    def error(self, error: GatewayError) -> bytes:
        return _ENCODER.encode(error_body(error))

    def events(self, call: ModelCall, header: ReplyHeader) -> EventStream:
        return ResponseEvents(self._tokenizer, _own(call), header)


def _own(call: ModelCall) -> ResponsesCall:
    if not isinstance(call, ResponsesCall):
        raise TypeError(f"{type(call).__name__} was not read by this dialect")
    return call


def _refuse(prompt: _Prompt) -> None:
    """Raise for the first field that asks for something that is not honoured."""
    refuse_unhonoured(prompt, {name: values for name, values in _NEUTRAL.items() if hasattr(prompt, name)})


def _include(asked: Iterable[str]) -> frozenset[str]:
    for each in asked:
        if each not in (_LOGPROBS, _ENCRYPTED):
            raise unsupported("include", each, f"use {_LOGPROBS!r} or {_ENCRYPTED!r}")
    return frozenset(asked)


def _previous(response_id: str | None) -> str | None:
    """The call behind a response."""
    if response_id is not None and not response_id.startswith(RESPONSE_PREFIX):
        raise invalid("previous_response_id", f"{response_id!r} is no id of a response, such as 'resp_1f...'")
    return response_id.removeprefix(RESPONSE_PREFIX) if response_id else None


def _parses_tool_calls(prompt: _Prompt) -> bool:
    return bool(prompt.tools) and prompt.tool_choice != "none"


def _must_call(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> list[str]:
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return must_call([tool["function"]["name"] for tool in tools], tools, "tool_choice")
    if isinstance(choice, dict):
        named = [choice] if choice.get("type") == "function" else None
        if choice.get("type") == "allowed_tools" and choice.get("mode") == "required":
            named = choice.get("tools")
        if isinstance(named, list) and all(_names_a_function(each) for each in named):
            return must_call([each["name"] for each in named], tools, "tool_choice")
    remedy = 'use "auto", "none", "required" or functions: {"type": "function", "name": NAME}'
    raise unsupported("tool_choice", choice, remedy)


def _names_a_function(choice: Any) -> bool:
    return (
        isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str)
    )


def _json_schema(text: _Text | None) -> dict[str, Any] | None:
    wanted = text and text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_schema" and wanted.schema_ is None:
        raise invalid("text.format.schema", "text.format of the type 'json_schema' needs a schema")
    return wanted.schema_ or {"type": "object"}


def _top_logprobs(asked: int | None, include: frozenset[str]) -> int:
    if asked and _LOGPROBS not in include:
        raise invalid("top_logprobs", f"top_logprobs is only allowed with include=[{_LOGPROBS!r}]")
    return asked or 0


def _given(value: Struct) -> dict[str, Any]:
    return {name: each for name, each in msgspec.to_builtins(value).items() if each is not None}


def _echo(request: _Request) -> dict[str, Any]:
    """The request's fields as the response repeats them, with OpenAI's defaults."""
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": _given(request.text.format) if request.text and request.text.format else _PLAIN},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
