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

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.dialects.base import (
    Completion,
    EventStream,
    ModelCall,
    ReplyHeader,
    TokenCounter,
)
from tinkerscript.gateway.dialects.chat_events import error_body
from tinkerscript.gateway.dialects.reading import decode, invalid, refuse_unhonoured, unsupported
from tinkerscript.gateway.dialects.responses_events import ResponseEvents
from tinkerscript.gateway.dialects.responses_input import neutral_tools, normalised
from tinkerscript.gateway.dialects.responses_output import (
    RESPONSE_PREFIX,
    ResponsesCall,
    ResponseWriter,
)
from tinkerscript.gateway.tokenizer import LightTokenizer

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
    "parallel_tool_calls": (True,),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that are known and not honoured, with the values that ask for nothing. None always does."""

_NEUTRAL_PARTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "reasoning": {},
    "stream_options": {"include_obfuscation": (False,)},
    "text": {"format": ({"type": "text"},)},
}
"""Objects of which no field is honoured but with the values that ask for nothing."""


class _Prompt(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both a response and its count are asked for with."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    # Known and not honoured: see _NEUTRAL and _NEUTRAL_PARTS.
    conversation: Any = None
    parallel_tool_calls: Any = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Any = None


class _Request(_Prompt, kw_only=True):
    include: list[str] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    return_token_ids: bool | None = None
    # Accepted, of no consequence here.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    user: str | None = None
    # Known and not honoured: see _NEUTRAL and _NEUTRAL_PARTS.
    access_programs: Any = None
    background: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    service_tier: Any = None
    stream_options: dict[str, Any] | None = None
    top_logprobs: Any = None


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
            tools=neutral_tools(request.tools or ()),
            parse_tool_calls=_parses_tool_calls(request),
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or -1,
            logprobs=_LOGPROBS in include,
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
    for name, neutral in _NEUTRAL_PARTS.items():
        part: dict[str, Any] = getattr(prompt, name, None) or {}
        for field, value in part.items():
            if value is not None and value not in neutral.get(field, ()):
                raise unsupported(f"{name}.{field}", value)


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
    choice = prompt.tool_choice
    if choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", choice, "use 'auto' or 'none'")
    return bool(prompt.tools) and choice != "none"


def _echo(request: _Request) -> dict[str, Any]:
    """The request's fields as the response repeats them, with OpenAI's defaults."""
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": True,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
