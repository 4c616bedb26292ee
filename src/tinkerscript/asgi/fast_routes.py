"""The endpoints of one JSON body and one JSON reply, served without FastAPI's work for each request.

FastAPI documents them from their signatures like any others; a request to one of them is answered before it
comes to FastAPI's routing, by pydantic's own JSON parser and writer, in about half of the processor time
(`bench/interchange.py`). Refusals are the same ones: see `refusals`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkerscript.asgi import refusals
from tinkerscript.errors import InterchangeError
from tinkerscript.server.auth import Role, Roles

Handler = Callable[[Any, Request], Awaitable[BaseModel | Response]]


@dataclass(frozen=True, slots=True)
class JsonEndpoint:
    """`POST path`. The handler is `async (body: Model, request: Request) -> Model | Response`."""

    path: str
    role: Role
    handler: Handler


def add_endpoints(app: FastAPI, roles: Roles, endpoints: Iterable[JsonEndpoint], *, tags: list[str]) -> None:
    """Document the endpoints in `app`, and serve them."""
    endpoints = list(endpoints)
    router = APIRouter(tags=list(tags))
    for endpoint in endpoints:
        router.post(endpoint.path)(endpoint.handler)
    app.include_router(router)
    app.add_middleware(JsonEndpoints, roles=roles, endpoints=endpoints)


class JsonEndpoints:
    """ASGI middleware that answers the endpoints it knows, and passes everything else on."""

    def __init__(self, app: ASGIApp, *, roles: Roles, endpoints: Iterable[JsonEndpoint]) -> None:
        self._app = app
        self._roles = roles
        self._endpoints = {each.path: (each, _parser_of(each)) for each in endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if known is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request, *known)
        except (InterchangeError, RequestValidationError, HTTPException) as error:
            response = refusals.answer(request, error)
        await response(scope, receive, send)

    async def _answer(
        self, request: Request, endpoint: JsonEndpoint, parse: Callable[[bytes], BaseModel]
    ) -> Response:
        self._roles.check(endpoint.role, request.scope)
        reply = await endpoint.handler(parse(await request.body()), request)
        if isinstance(reply, Response):
            return reply
        return Response(reply.__pydantic_serializer__.to_json(reply), media_type="application/json")


def _parser_of(endpoint: JsonEndpoint) -> Callable[[bytes], BaseModel]:
    model: type[BaseModel] = get_type_hints(endpoint.handler)["body"]
    validate = model.__pydantic_validator__.validate_json

    def parse(body: bytes) -> BaseModel:
        try:
            return validate(body)
        except ValidationError as error:
            raise RequestValidationError([_of_body(each) for each in error.errors()], body=body) from None

    return parse


def _of_body(error: Any) -> dict[str, Any]:
    """As FastAPI writes it: the place begins with `body`."""
    return {**error, "loc": ("body", *error["loc"])}
