"""How every refusal of the server looks: the status for the caller's retry logic, the reason in words.

Invariant: each body is a `RefusalResponse`, under `/v1` OpenAI's error object, or Anthropic's where its
clients call; each reply that asks for a retry says when.

The limit on request bodies, as ASGI middleware.

Invariant: no more than `max_bytes` of a body are ever held, whether the request says its length or streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinkerscript.errors import (
    ConflictError,
    InterchangeError,
    NotTheOwnerError,
    QuotaError,
    StoreError,
    UnauthorizedError,
    UnknownEpisodeError,
)
from tinkerscript.gateway.dialects import REFUSAL_BODIES
from tinkerscript.protocol import RefusalResponse

RETRY_AFTER_S = 1


_STATUS: dict[type[InterchangeError], int] = {
    UnknownEpisodeError: 404,
    NotTheOwnerError: 409,
    ConflictError: 409,
    QuotaError: 429,
    StoreError: 503,
}


def install(app: FastAPI) -> None:
    """Answer errors of `app` as refusals."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return answer(request, error)

    for kind in (InterchangeError, RequestValidationError, HTTPException, Exception):
        app.exception_handler(kind)(handle)


def answer(request: Request, error: Exception) -> JSONResponse:
    """The refusal that `error` is. The framework raises a defect again and logs its traceback."""
    match error:
        case UnauthorizedError():
            return refusal(request, error.status, str(error))
        case InterchangeError():
            return refusal(request, _STATUS.get(type(error), 500), str(error))
        case RequestValidationError():
            reasons = [_explain(item) for item in error.errors()]
            return refusal(request, 422, "; ".join(reasons))
        case HTTPException():
            return refusal(request, error.status_code, str(error.detail))
        case _:
            reason = f"a defect of the server ({type(error).__name__}); its log has the details"
            return refusal(request, 500, reason)


def refusal(request: Request, status: int, reason: str) -> JSONResponse:
    """The refusal as a reply."""
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    for prefix, body in REFUSAL_BODIES.items():
        if request.url.path.startswith(prefix):
            return JSONResponse(body(status, reason), status, headers)
    return JSONResponse(RefusalResponse(failure_reason=reason).model_dump(), status, headers)


def _explain(item: Mapping[str, Any]) -> str:
    if item["type"] == "json_invalid":
        return f"the body is not valid JSON: {item['ctx']['error']}"
    field = ".".join(str(part) for part in item["loc"][1:]) or "the body"
    return f"{field}: {item['msg']}"


class BodyLimit:
    """Answers 413 to a request whose body is longer than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if length is None:
            await self._app(scope, self._counted(receive), send)
        elif int(length) > self._max_bytes:  # the HTTP parser has checked that it is a number
            await refusal(Request(scope), 413, self._reason(int(length)))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _counted(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, self._reason(received))
            return message

        return counted

    def _reason(self, length: int) -> str:
        return (
            f"the body has {length} bytes or more; interchange_server.max_body_bytes allows {self._max_bytes}"
        )
