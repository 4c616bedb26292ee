"""Strict parsing of requests: JSON into typed structs, with errors that name the field.

Invariant: a field is honored or refused by name. A field that is null counts as not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import Tool

T = TypeVar("T")

SHOWN = 80
"""Characters of a refused value that the error quotes."""


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a request. Raises GatewayError 400 that names the invalid field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(400, "invalid_json", f"the request body is not valid JSON: {error}") from error


def convert(value: Mapping[str, Any], kind: type[T], where: str) -> T:
    """Convert the part of a request at `where` to a struct; null fields count as not set.

    Raises GatewayError 400 that names the invalid field.
    """
    given = {name: each for name, each in value.items() if each is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), where) from error


def _explained(text: str, where: str = "") -> GatewayError:
    """The error for a message of msgspec's, such as "Expected `int`, got `str` - at `$.n`".

    A field that is declared as None is known and not supported.
    """
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
    """The error for a value that is not allowed."""
    return GatewayError(400, code, message, param=param)


def unsupported(param: str, value: object, remedy: str = "") -> GatewayError:
    """The error for a value that this server does not honor. Default remedy: leave the field out."""
    shown = msgspec.json.encode(value).decode()
    message = f"{param}={shown[:SHOWN]} is not supported by this server; {remedy or f'leave {param} out'}"
    return GatewayError(400, "unsupported_parameter", message, param=param)


def unsupported_content(kind: object, where: str) -> GatewayError:
    """The error for a content part that is not text."""
    message = f"content of the type {kind!r} is not supported; only text is"
    return GatewayError(400, "unsupported_content", message, param=where)


def refuse_unsupported_fields(request: object, no_ops: Mapping[str, Sequence[Any]], where: str = "") -> None:
    """Raise GatewayError 400 for the first field in `no_ops` that is set to anything but None or a no-op.

    `no_ops` lists fields that are known and not supported, with the values that change nothing. A field that
    is a Python keyword ends in an underscore here. Fields that the request's struct lacks are skipped.
    """
    for name, values in no_ops.items():
        value = getattr(request, name, None)
        if value is not None and value not in values:
            field = name.removesuffix("_")
            raise unsupported(f"{where}.{field}" if where else field, value)


def required_tools(names: Sequence[str], tools: Sequence[Tool], param: str) -> list[str]:
    """`names`, as the tools of which one must be called. Raises GatewayError 400 unless `tools` has them."""
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            raise invalid(param, f"{param} names {name!r}, which is not among the tools")
    if not names:
        raise invalid(param, f"{param} requires a tool call, so the request needs tools")
    return list(names)
