"""`Endpoint`: one endpoint of the wire, and how its body is read.

Bodies are read by the SDK's own request types, which know their fields and refuse others; the error names
the field.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from tinkerscript.errors import WireError
from tinkerscript.tinker_api.state import WireState

PREFIX = "/api/v1/"


M = TypeVar("M", bound=BaseModel)


Reply = dict[str, Any] | Response | None
"""A JSON object, a whole response, or None for an empty one."""


EndpointHandler = Callable[[WireState, Request, bytes], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str
    """After `PREFIX`; parts in braces are the request's `path_params`."""

    handler: EndpointHandler


def post(path: str, model: type[M], handler: Callable[[WireState, M], Awaitable[Reply]]) -> Endpoint:
    """`POST path` with a JSON body that `model` reads."""

    async def handle(state: WireState, request: Request, body: bytes) -> Reply:
        del request
        return await handler(state, read(model, body))

    return Endpoint("POST", path, handle)


def read(model: type[M], body: bytes) -> M:
    """Raises WireError 422 naming the field and the value."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in item['loc']) or 'body'}: {item['msg']}, "
            f"got {_short(item.get('input'))}"
            for item in error.errors()
        ]
        raise WireError(422, "; ".join(problems)) from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
