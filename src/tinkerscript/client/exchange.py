"""Requests to the interchange server without the I/O.

An `Operation` is a generator. It yields an `HttpRequest` to send or a `Wait` to sleep, receives the `Reply`,
and returns the result.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from tinkerscript.errors import ClaimLostError, RequestRefusedError, ServerUnreachableError
from tinkerscript.protocol import RefusalResponse

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60.0

REPLY_TIMEOUT_S = 30.0  # In addition to the time that the server may hold the request.
CLAIM_PATH = "/claim_episode"  # Logs a warning while the server is away, because a whole worker waits.
WARN_AFTER_S = 2.0
WARN_AGAIN_AFTER_S = 60.0

LOST_CLAIM = frozenset({401, 403, 404, 409, 410})  # The claim is unknown or has lost its lease.
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_RETRIED = frozenset({408, 425, 429})

_REMEDIES = {
    401: " (give the client its token: token=..., or TINKERSCRIPT_CLIENT_TOKEN or ..._TOKEN_FILE)",
    404: " (is this the URL of an interchange server, without a path?)",
    413: " (send less: a smaller payload or less metadata)",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    method: str
    path: str
    body: bytes | None
    timeout_s: float
    key: str | None = field(default=None, repr=False)  # The claim's key, in place of the client's token.

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


def post(path: str, message: BaseModel, *, hold_s: float = 0.0, key: str | None = None) -> HttpRequest:
    return HttpRequest("POST", path, message.model_dump_json().encode(), hold_s + REPLY_TIMEOUT_S, key)


@dataclass(frozen=True, slots=True)
class Wait:
    delay_s: float


@dataclass(frozen=True, slots=True)
class Response:
    # Header names are lower case.
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_retryable(self) -> bool:
        return self.status >= 500 or self.status in _RETRIED

    @property
    def reason(self) -> str:
        try:
            return RefusalResponse.model_validate_json(self.body).failure_reason
        except ValidationError:
            if "html" in self.headers.get("content-type", ""):
                return "an HTML page, which no interchange server sends"
            return self.body[:500].decode(errors="replace") or "(no reason given)"

    @property
    def retry_after_s(self) -> float | None:
        # None if it is missing or a date.
        try:
            seconds = float(self.headers.get("retry-after", ""))
        except ValueError:
            return None
        return seconds if math.isfinite(seconds) and seconds >= 0 else None


Reply: TypeAlias = Response | Exception | None
"""The response, or the error that prevented one; None after a `Wait`."""

Operation: TypeAlias = Generator[HttpRequest | Wait, Reply, T]


@dataclass(frozen=True, slots=True)
class Timing:
    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[float, float], float] = random.uniform

    def delay(self, failures: int, retry_after_s: float | None = None) -> float:
        if retry_after_s is not None:
            return min(retry_after_s, MAX_RETRY_AFTER_S) * self.uniform(1.0, 1.25)
        return min(_FIRST_DELAY_S * 2.0 ** min(failures, 16), _MAX_DELAY_S) * self.uniform(0.5, 1.0)


def respond(
    request: HttpRequest, *, timeout_s: float | None, timing: Timing, max_delay_s: float = math.inf
) -> Operation[Response]:
    """Send `request` until the server gives a definite response, at least every `max_delay_s` seconds.

    Raises ServerUnreachableError after `timeout_s` seconds (None: never).
    """
    failures, failing_since, warn_at = 0, 0.0, 0.0
    while True:
        reply = yield request
        if isinstance(reply, Response) and not reply.is_retryable:
            return reply
        now = timing.clock()
        if not failures:
            failing_since, warn_at = now, now + WARN_AFTER_S
        delay_s = timing.delay(failures, reply.retry_after_s if isinstance(reply, Response) else None)
        failures += 1
        if timeout_s is not None and now + delay_s - failing_since > timeout_s:
            raise ServerUnreachableError(
                f"no useful answer to {request.path} for {now - failing_since:.1f} s "
                f"(timeout_s={timeout_s:g}); the last problem: {_problem(reply)}. "
                "Check that the server runs and that its URL is right; a larger timeout_s waits longer"
            ) from (reply if isinstance(reply, Exception) else None)
        if request.path == CLAIM_PATH and now + delay_s >= warn_at:
            warn_at = now + WARN_AGAIN_AFTER_S
            limit = "" if timeout_s is None else f"; giving up after {timeout_s:.0f} s"
            logger.warning("waiting for the server: %s%s", _problem(reply), limit)
        yield Wait(min(delay_s, max_delay_s))


def read(response: Response, parse: Callable[[bytes], T], *, may_lose_claim: bool = False) -> T:
    """Parse a success. Raises RequestRefusedError, or if `may_lose_claim`, ClaimLostError."""
    if response.status >= 300:
        if may_lose_claim and response.status in LOST_CLAIM:
            raise ClaimLostError(response.reason)
        raise RequestRefusedError(response.status, response.reason + _REMEDIES.get(response.status, ""))
    try:
        return parse(response.body)
    except ValidationError as error:
        raise RequestRefusedError(response.status, f"unexpected reply: {error}") from error


def _problem(reply: Reply) -> str:
    if isinstance(reply, Response):
        return f"HTTP {reply.status}: {reply.reason}"
    return str(reply) or type(reply).__name__
