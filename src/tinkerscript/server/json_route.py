"""`JsonRoute`: an endpoint of one JSON body and one JSON reply, without FastAPI's work for each request.

FastAPI documents the route from the endpoint's signature, as always; a request is then served by pydantic's own
JSON parser and writer, which takes less than half of the time. Errors are the same ones: see `refusals`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import request_response

JSON = "application/json"


class JsonRoute(APIRoute):
    """A route whose endpoint is `async (body: Model, request: Request) -> Model | Response`.

    Its dependencies take the request alone and are awaited in order, before the body is read.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        # FastAPI's own wrapper opens two exit stacks for dependencies with `yield`; these have none.
        self.app = request_response(self.get_route_handler())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        checks: list[Callable[[Request], Awaitable[None]]] = [
            each.dependency for each in self.dependencies if each.dependency
        ]
        endpoint: Callable[[BaseModel, Request], Awaitable[BaseModel | Response]] = self.endpoint
        model: type[BaseModel] = get_type_hints(self.endpoint)["body"]
        parse = model.__pydantic_validator__.validate_json

        async def handle(request: Request) -> Response:
            for check in checks:
                await check(request)
            body = await request.body()
            try:
                parsed = parse(body)
            except ValidationError as error:
                raise RequestValidationError([_of_body(each) for each in error.errors()], body=body) from None
            reply = await endpoint(parsed, request)
            if isinstance(reply, Response):
                return reply
            return Response(reply.__pydantic_serializer__.to_json(reply), media_type=JSON)

        return handle


def _of_body(error: Any) -> dict[str, Any]:
    return {**error, "loc": ("body", *error["loc"])}
