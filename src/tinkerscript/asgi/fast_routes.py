"""Fast routes: endpoints with a JSON body and a JSON reply, served without FastAPI's overhead per request.

FastAPI documents them from their signatures, like all others. A request to one of them is answered before
FastAPI's routing, with pydantic's own JSON parser and writer, in about half the processor time
(`bench/interchange.py`). Invariant: they refuse exactly like FastAPI's routes (see `refusals`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkerscript.asgi.refusals import Refusals
from tinkerscript.errors import InterchangeError

FastHandler = Callable[[Any, Request], Awaitable[BaseModel | Response]]
"""`async (body: Model, request: Request) -> Model | Response`."""

Authorize = Callable[[Scope], None]
"""Raises UnauthorizedError for a request that may not pass."""


def add_fast_routes(
    app: FastAPI,
    handlers: Mapping[str, FastHandler],
    *,
    authorize: Authorize,
    refusals: Refusals,
    tags: list[str],
) -> None:
    """Serve `POST path` for each path in `handlers`, and document the routes in `app`."""
    router = APIRouter(tags=list(tags))
    for path, handler in handlers.items():
        router.post(path)(handler)
    app.include_router(router)
    app.add_middleware(FastRoutes, handlers=handlers, authorize=authorize, refusals=refusals)


class FastRoutes:
    """ASGI middleware that answers its own paths and passes all other requests on."""

    def __init__(
        self, app: ASGIApp, *, handlers: Mapping[str, FastHandler], authorize: Authorize, refusals: Refusals
    ) -> None:
        self._app = app
        self._routes = {path: (handler, _parser_of(handler)) for path, handler in handlers.items()}
        self._authorize = authorize
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await self._answer(request, *route)
        except (InterchangeError, RequestValidationError, HTTPException) as error:
            response = self._refusals.answer(request, error)
        await response(scope, receive, send)

    async def _answer(
        self, request: Request, handler: FastHandler, parse: Callable[[bytes], BaseModel]
    ) -> Response:
        self._authorize(request.scope)
        reply = await handler(parse(await request.body()), request)
        if isinstance(reply, Response):
            return reply
        return Response(reply.__pydantic_serializer__.to_json(reply), media_type="application/json")


def _parser_of(handler: FastHandler) -> Callable[[bytes], BaseModel]:
    model: type[BaseModel] = get_type_hints(handler)["body"]
    validate = model.__pydantic_validator__.validate_json

    def parse(body: bytes) -> BaseModel:
        try:
            return validate(body)
        except ValidationError as error:
            raise RequestValidationError([_of_body(each) for each in error.errors()], body=body) from None

    return parse


def _of_body(error: Any) -> dict[str, Any]:
    """The error as FastAPI writes it: its location begins with `body`."""
    return {**error, "loc": ("body", *error["loc"])}
