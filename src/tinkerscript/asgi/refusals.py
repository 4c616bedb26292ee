"""How every refusal of the server looks: a status for the caller's retry logic, and the reason in words.

Invariant: each body is a `RefusalResponse`, or under a given path prefix the error object of that API; each
reply that asks for a retry says when. `BodyLimit` holds at most `max_bytes` of a request's body, whether the
request declares its length or streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tinkerscript.protocol import RefusalResponse

RETRY_AFTER_S = 1
"""Seconds after which a client should retry."""

_STATUS: dict[type[InterchangeError], int] = {
    UnknownEpisodeError: 404,
    NotTheOwnerError: 409,
    ConflictError: 409,
    QuotaError: 429,
    StoreError: 503,
}

RefusalBody = Callable[[int, str], dict[str, Any]]
"""From the status and the reason."""


class Refusals:
    """Turns errors into replies."""

    def __init__(self, bodies: Mapping[str, RefusalBody]) -> None:
        """`bodies`: path prefix -> the body of a refusal there; the first prefix that matches counts."""
        self._bodies = bodies

    def install(self, app: FastAPI) -> None:
        """Answer the errors of `app` as refusals."""

        async def handle(request: Request, error: Exception) -> JSONResponse:
            return self.answer(request, error)

        for kind in (InterchangeError, RequestValidationError, HTTPException, Exception):
            app.exception_handler(kind)(handle)

    def answer(self, request: Request, error: Exception) -> JSONResponse:
        """The refusal for `error`. For a defect the framework raises it again and logs its traceback."""
        match error:
            case UnauthorizedError():
                return self.refuse(request, error.status, str(error))
            case InterchangeError():
                return self.refuse(request, _STATUS.get(type(error), 500), str(error))
            case RequestValidationError():
                return self.refuse(request, 422, "; ".join(_explain(item) for item in error.errors()))
            case HTTPException():
                return self.refuse(request, error.status_code, str(error.detail))
            case _:
                reason = f"internal error ({type(error).__name__}); see the server's log"
                return self.refuse(request, 500, reason)

    def refuse(self, request: Request, status: int, reason: str) -> JSONResponse:
        """The refusal as a reply."""
        headers: dict[str, str] = {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        elif status in (429, 503):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        path = request.url.path
        body = next((body for prefix, body in self._bodies.items() if path.startswith(prefix)), _plain_body)
        return JSONResponse(body(status, reason), status, headers)


def _plain_body(status: int, reason: str) -> dict[str, Any]:
    return RefusalResponse(failure_reason=reason).model_dump()


def _explain(item: Mapping[str, Any]) -> str:
    if item["type"] == "json_invalid":
        return f"the body is not valid JSON: {item['ctx']['error']}"
    field = ".".join(str(part) for part in item["loc"][1:]) or "the body"
    return f"{field}: {item['msg']}"


class BodyLimit:
    """ASGI middleware that answers 413 to a request whose body is longer than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int, refusals: Refusals) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if length is None:
            await self._app(scope, self._counted(receive), send)
        elif int(length) > self._max_bytes:  # The HTTP parser has checked that it is a number.
            refusal = self._refusals.refuse(Request(scope), 413, self._reason(int(length)))
            await refusal(scope, receive, send)
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
