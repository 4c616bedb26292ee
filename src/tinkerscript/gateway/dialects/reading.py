"""Reading requests: JSON into typed structs, with errors that name the field.

Invariant: what a request asks for is honoured or refused by name. A field that is null asks for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.messages import Tool

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
