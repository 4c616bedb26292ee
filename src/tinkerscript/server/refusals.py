"""How every refusal of the server looks: the status for the caller's retry logic, the reason in words.

Invariant: each body is a `RefusalResponse`, under `/v1` OpenAI's error object; each reply that asks for a
retry says when.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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

_STATUS: dict[type[InterchangeError], int] = {
    UnknownEpisodeError: 404,
    NotTheOwnerError: 409,
    ConflictError: 409,
    QuotaError: 429,
    StoreError: 503,
}


def install(app: FastAPI) -> None:
    """Answer errors of `app` as refusals."""

    @app.exception_handler(InterchangeError)
    async def interchange_error(request: Request, error: InterchangeError) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        status = error.status if isinstance(error, UnauthorizedError) else _STATUS.get(type(error), 500)
        return refusal(request, status, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        reasons = [_explain(item["type"], item["loc"], item["msg"]) for item in error.errors()]
        return refusal(request, 422, "; ".join(reasons))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return refusal(request, error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        # The error is raised again after the reply, and uvicorn logs it with its traceback.
        return refusal(
            request, 500, f"a defect of the server ({type(error).__name__}); its log has the details"
        )


def refusal(request: Request, status: int, reason: str) -> JSONResponse:
    """The refusal as a reply."""
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if request.url.path.startswith("/v1/"):
        error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error}, status, headers)
    return JSONResponse(RefusalResponse(failure_reason=reason).model_dump(), status, headers)


def _explain(kind: str, loc: tuple[int | str, ...], message: str) -> str:
    if kind == "json_invalid":
        return "the body is not valid JSON"
    field = ".".join(str(part) for part in loc[1:]) or "the body"
    return f"{field}: {message}"
