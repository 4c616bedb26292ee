"""Parse requests strictly into typed structs. Errors are GatewayError 400 and name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import Tool
from tinkerscript.limits import MAX_TOKENS, TOP_K, TOP_LOGPROBS

T = TypeVar("T")

MaxTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS.limit)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=TOP_K.limit)]
TopLogprobs = Annotated[int, Meta(ge=0, le=TOP_LOGPROBS.limit)]

ONLY_TEXT = "only text is"

DIRECT = {"type": "direct"}  # The model itself called the tool.


class Unsupported:
    """Marks a known field that is refused unless null or one of `values`."""

    def __init__(self, *values: Any) -> None:
        self.values = values


SHOWN_CHARS = 80


def sampling_arguments(request: Any) -> dict[str, Any]:
    return {
        "model": request.model,
        "temperature": request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "top_k": request.top_k or -1,
        "return_token_ids": bool(request.return_token_ids),
        "stream": bool(request.stream),
    }


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(400, "invalid_json", f"the request body is not valid JSON: {error}") from error
    return _honored(request, "")


def convert(value: Mapping[str, Any], kind: type[T], where: str) -> T:
    given = {name: each for name, each in value.items() if each is not None}
    try:
        converted = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), where) from error
    return _honored(converted, where)


def _honored(request: T, where: str) -> T:
    for name, unset in _unsupported_fields(type(request)).items():
        value = getattr(request, name)
        if value is not None and value not in unset.values:
            field = name.removesuffix("_")
            raise unsupported(f"{where}.{field}" if where else field, value)
    return request


@cache
def _unsupported_fields(kind: type[Any]) -> dict[str, Unsupported]:
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, Unsupported)
    }


def _explained(text: str, where: str = "") -> GatewayError:
    # msgspec writes "Expected `int`, got `str` - at `$.n`". Fields declared as None are unsupported.
    problem, _, place = text.partition(" - at ")
    inner = place.strip("`").removeprefix("$")
    place = f"{where}{inner}".removeprefix(".")
    if unknown := re.search(r"unknown field `(.+)`", problem):
        name = f"{place}.{unknown[1]}" if place else unknown[1]
        message = f"unknown or unsupported parameter: {name!r}"
        return GatewayError(400, "unknown_parameter", message, param=name)
    if missing := re.search(r"missing required field `(.+)`", problem):
        name = f"{place}.{missing[1]}" if place else missing[1]
        return invalid(name, f"missing required parameter: {name!r}", code="missing_required_parameter")
    if problem.startswith("Expected `null`"):
        message = f"{place} is not supported by this server; leave it out"
        return invalid(place, message, code="unsupported_parameter")
    return invalid(place or None, f"invalid value for {place or 'the request body'!r}: {problem}")


def invalid(param: str | None, message: str, *, code: str = "invalid_value") -> GatewayError:
    return GatewayError(400, code, message, param=param)


def unsupported(param: str, value: object, remedy: str = "") -> GatewayError:
    shown = msgspec.json.encode(value).decode()
    message = (
        f"{param}={shown[:SHOWN_CHARS]} is not supported by this server; {remedy or f'leave {param} out'}"
    )
    return GatewayError(400, "unsupported_parameter", message, param=param)


def unsupported_content(kind: object, where: str, reason: str = ONLY_TEXT) -> GatewayError:
    message = f"content of the type {kind!r} is not supported; {reason}"
    return GatewayError(400, "unsupported_content", message, param=where)


def required_tools(names: Sequence[str] | None, tools: Sequence[Tool]) -> list[str]:
    known = [tool["function"]["name"] for tool in tools]
    names = known if names is None else names
    for name in names:
        if name not in known:
            raise invalid("tool_choice", f"tool_choice names {name!r}, which is not among the tools")
    if not names:
        raise invalid("tool_choice", "tool_choice requires a tool call, so the request needs tools")
    return list(names)


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> Tool:
    given = {"description": description, "parameters": parameters}
    set_fields = {field: value for field, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": name, **set_fields}}
