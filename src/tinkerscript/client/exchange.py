"""An `Exchange`: one operation with the interchange server, without the I/O.

A face sends `exchange.request`, feeds it the reply or the transport error, and does what it is told: wait
and send again, or return the value. The invariant: an operation either returns what the server stored
or raises; no error is taken for an answer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from tinkerscript.errors import ClaimLostError, RequestRefusedError, ServerUnreachableError
from tinkerscript.protocol import RefusalResponse

MAX_RETRY_AFTER_S = 60.0

REPLY_TIMEOUT_S = 30.0
"""Seconds that a reply may take beyond the time that the server was asked to hold the request."""

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_LOST = frozenset({403, 404, 409, 410})
_RETRIED = frozenset({408, 425, 429})

_REMEDIES = {
    401: " (give the client its token: token=..., or TINKERSCRIPT_CLIENT_TOKEN or ..._TOKEN_FILE)",
    404: " (is this the URL of an interchange server, without a path?)",
    413: " (send less: a smaller payload or less metadata)",
}
"""What a user can do about a status, after the server's own words."""

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request as a face sends it."""

    method: str
    path: str
    body: bytes | None
    timeout_s: float
    """Seconds that the reply may take."""


def post(path: str, message: BaseModel, *, hold_s: float = 0.0) -> HttpRequest:
    """A POST of `message` as JSON, which the server may hold for `hold_s` seconds."""
    return HttpRequest("POST", path, message.model_dump_json().encode(), hold_s + REPLY_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Wait:
    """Send the exchange's request again after `delay_s` seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Done(Generic[ReplyT]):
    """The operation is complete."""

    value: ReplyT


@dataclass(frozen=True, slots=True)
class Timing:
    """The clock (seconds, monotonic) and the random numbers that delays are made of."""

    clock: Callable[[], float] = time.monotonic
    uniform: Callable[[float, float], float] = random.uniform

    def delay(self, failures: int, retry_after_s: float | None = None) -> float:
        """Seconds before the next try: what the server asked for, or a doubling delay, with jitter."""
        if retry_after_s is not None:
            return min(retry_after_s, MAX_RETRY_AFTER_S) * self.uniform(1.0, 1.25)
        return min(_FIRST_DELAY_S * 2.0 ** min(failures, 16), _MAX_DELAY_S) * self.uniform(0.5, 1.0)


class Exchange(Generic[ReplyT]):
    """One operation: a request that is repeated until it has its answer."""

    def __init__(
        self,
        request: HttpRequest,
        read: Callable[[bytes], ReplyT],
        *,
        timeout_s: float | None,
        timing: Timing,
        may_lose_claim: bool = False,
    ) -> None:
        self.request = request
        self._read = read
        self._timeout_s = timeout_s
        self.timing = timing
        self._may_lose_claim = may_lose_claim
        self._failures = 0
        self._failing_since: float | None = None

    def answered(self, status: int, headers: Mapping[str, str], body: bytes) -> Done[ReplyT] | Wait:
        """The server replied. Header names are lower case.

        Raises ClaimLostError, RequestRefusedError, or ServerUnreachableError once it has been
        unavailable for too long.
        """
        if status >= 500 or status in _RETRIED:
            return self._again(f"HTTP {status}: {read_reason(body)}", _retry_after(headers))
        if status >= 300:
            if self._may_lose_claim and status in _LOST:
                raise ClaimLostError(read_reason(body))
            raise RequestRefusedError(status, read_reason(body) + _REMEDIES.get(status, ""))
        try:
            value = self._read(body)
        except ValidationError as error:
            raise RequestRefusedError(status, f"the reply is not what was asked for: {error}") from error
        self._failures, self._failing_since = 0, None
        return self.accept(value)

    def unreachable(self, error: Exception) -> Wait:
        """No reply came. Raises ServerUnreachableError once that lasted too long."""
        return self._again(str(error) or type(error).__name__, None)

    def accept(self, value: ReplyT) -> Done[ReplyT] | Wait:
        return Done(value)

    def _again(self, problem: str, retry_after_s: float | None) -> Wait:
        now = self.timing.clock()
        if self._failing_since is None:
            self._failing_since = now
        delay_s = self.timing.delay(self._failures, retry_after_s)
        self._failures += 1
        if self._timeout_s is not None and now + delay_s - self._failing_since > self._timeout_s:
            raise ServerUnreachableError(
                f"no useful answer to {self.request.path} for {now - self._failing_since:.1f} s "
                f"(timeout_s={self._timeout_s:g}); the last problem: {problem}. "
                "Check that the server runs and that its URL is right; a larger timeout_s waits longer"
            )
        return Wait(delay_s)


def read_reason(body: bytes) -> str:
    """The words of a refusal, or what came instead of one."""
    try:
        return RefusalResponse.model_validate_json(body).failure_reason
    except ValidationError:
        return body[:500].decode(errors="replace") or "(no reason given)"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header; None for none, or for one that holds a date."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
