"""Requests for a response, and for a count of its prompt's tokens.

Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from tinkerscript.gateway.chat_messages import Tool
from tinkerscript.gateway.dialects.dialect import ModelCall
from tinkerscript.gateway.dialects.openai import MAX_TOP_LOGPROBS
from tinkerscript.gateway.dialects.responses.items import (
    RESPONSE_PREFIX,
    namespaces_of,
    normalized_messages,
    normalized_tools,
)
from tinkerscript.gateway.dialects.validation import (
    decode,
    invalid,
    refuse_unsupported_fields,
    required_tools,
    unsupported,
)

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"

_NO_OPS: dict[str, tuple[Any, ...]] = {
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
"""Fields that are known and not supported, with the values that change nothing."""


class ResponsesCall(ModelCall, frozen=True, kw_only=True):
    """A request for a response."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {**ModelCall.FIELD_NAMES, "json_schema": "text.format"}

    echo: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """The fields of the request that the response repeats."""

    namespaces: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict[str, tuple[str, str]])
    """The name that the model sees of each tool in a namespace -> namespace and name."""

    encrypted_reasoning: bool = False
    """Whether reasoning items repeat their text in `encrypted_content`."""


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
    """How much to reason and how to summarize it: not supported."""

    context: None = None
    effort: None = None
    generate_summary: None = None
    mode: None = None
    summary: None = None


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class _Prompt(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request for a response and of one for its token count."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    # Known and not supported: see _NO_OPS.
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
    # Accepted and ignored.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    user: str | None = None
    # Known and not supported: see _NO_OPS.
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


def parse_request(body: bytes) -> ResponsesCall:
    """Raises GatewayError 400 that names the field that is invalid or unsupported."""
    request = decode(_REQUEST, body)
    refuse_unsupported_fields(request, _NO_OPS)
    include, prompt = _include(request.include or ()), _prompt_arguments(request)
    return ResponsesCall(
        required_tools=_required_tools(request.tool_choice, prompt["tools"]),
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
        namespaces=namespaces_of(request.tools or ()),
        echo=_echo(request),
        **prompt,
    )


def parse_count(body: bytes) -> ResponsesCall:
    """Raises GatewayError 400 that names the field that is invalid or unsupported."""
    prompt = decode(_PROMPT, body)
    refuse_unsupported_fields(prompt, _NO_OPS)
    return ResponsesCall(**_prompt_arguments(prompt))


def _prompt_arguments(prompt: _Prompt) -> dict[str, Any]:
    return {
        "model": prompt.model,
        "previous": _previous(prompt.previous_response_id),
        "messages": normalized_messages(prompt.input, prompt.instructions),
        "tools": normalized_tools(prompt.tools or ()),
        "parse_tool_calls": bool(prompt.tools) and prompt.tool_choice != "none",
    }


def _include(requested: Iterable[str]) -> frozenset[str]:
    for each in requested:
        if each not in (_LOGPROBS, _ENCRYPTED):
            raise unsupported("include", each, f"use {_LOGPROBS!r} or {_ENCRYPTED!r}")
    return frozenset(requested)


def _previous(response_id: str | None) -> str | None:
    """The id of the call behind a response."""
    if response_id is not None and not response_id.startswith(RESPONSE_PREFIX):
        raise invalid("previous_response_id", f"{response_id!r} is not a response id, such as 'resp_1f...'")
    return response_id.removeprefix(RESPONSE_PREFIX) if response_id else None


def _required_tools(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> list[str]:
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return required_tools([tool["function"]["name"] for tool in tools], tools, "tool_choice")
    if isinstance(choice, dict):
        named = [choice] if choice.get("type") == "function" else None
        if choice.get("type") == "allowed_tools" and choice.get("mode") == "required":
            named = choice.get("tools")
        if isinstance(named, list) and all(_names_a_function(each) for each in named):
            return required_tools([each["name"] for each in named], tools, "tool_choice")
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


def _top_logprobs(requested: int | None, include: frozenset[str]) -> int:
    if requested and _LOGPROBS not in include:
        raise invalid("top_logprobs", f"top_logprobs is only allowed with include=[{_LOGPROBS!r}]")
    return requested or 0


def _set_fields(value: Struct) -> dict[str, Any]:
    return {name: each for name, each in msgspec.to_builtins(value).items() if each is not None}


def _echo(request: _Request) -> dict[str, Any]:
    """The fields of the request that the response repeats, with OpenAI's defaults."""
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
        "text": {
            "format": _set_fields(request.text.format) if request.text and request.text.format else _PLAIN
        },
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": "disabled",
        "user": request.user,
    }
