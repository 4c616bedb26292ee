"""`IdempotencyCache` finds requests that repeat an earlier one and should get its reply:

- Requests with the earlier one's `Idempotency-Key`, even after a restart. They wait while it is in flight; if
  it fails, one takes its place.
- Retries (`x-stainless-retry-count` above 0, from OpenAI's and Anthropic's clients) with the body of a
  request that is being recorded, or was after a disconnect. Each original serves one retry, and none after a
  restart.

A key that is reused for another body gets GatewayError 422.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.limits import IDEMPOTENCY_KEY
from tinkerscript.rollouts.call import Call

MAX_KEYS = 1024


MAX_UNDELIVERED = 64


_DIGEST_BYTES = 16


class RequestFingerprint(msgspec.Struct, frozen=True):
    key: str
    is_retry: bool
    digest: str


@dataclass(slots=True, eq=False)
class Attempt:
    fingerprint: RequestFingerprint
    call_id: str | None = None
    is_recording: bool = False  # Recorded even if the client disconnects.
    delivered: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


class IdempotencyCache:
    def __init__(self, calls: Iterable[Call] = ()) -> None:
        """`calls` are from before a restart, oldest first."""
        self._in_flight: dict[str, Attempt] = {}
        self._keyless: list[Attempt] = []

        # By key, with the request's digest.
        self._recorded: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._undelivered: OrderedDict[str, str] = OrderedDict()

        for call in calls:
            if call.idempotency_key:
                self._remember(call.idempotency_key, call.request_digest, first_id(call.call_id))

    def in_flight(self, fingerprint: RequestFingerprint) -> Attempt | None:
        if not fingerprint.key:
            return next((each for each in self._keyless if _is_being_recorded(each, fingerprint)), None)
        attempt = self._in_flight.get(fingerprint.key)
        if attempt is not None:
            _check(fingerprint, attempt.fingerprint.digest)
        return attempt

    def take(self, fingerprint: RequestFingerprint) -> str | None:
        """Return the first call id of the recorded request that this one repeats.

        An undelivered reply is returned only once.
        """
        if fingerprint.key:
            digest, call_id = self._recorded.get(fingerprint.key, (fingerprint.digest, None))
            _check(fingerprint, digest)
            return call_id
        if not fingerprint.is_retry:
            return None
        call_id = next(
            (each for each, digest in self._undelivered.items() if digest == fingerprint.digest), None
        )
        if call_id is not None:
            del self._undelivered[call_id]
        return call_id

    @contextmanager
    def attempt(self, fingerprint: RequestFingerprint) -> Generator[Attempt]:
        attempt = Attempt(fingerprint)
        if fingerprint.key:
            self._in_flight[fingerprint.key] = attempt
        else:
            self._keyless.append(attempt)
        try:
            yield attempt
        finally:
            if fingerprint.key:
                del self._in_flight[fingerprint.key]
            else:
                self._keyless.remove(attempt)
            self._settle(attempt)
            attempt.done.set()

    def _settle(self, attempt: Attempt) -> None:
        call_id, fingerprint = attempt.call_id, attempt.fingerprint
        if call_id is None:
            return
        if fingerprint.key:
            self._remember(fingerprint.key, fingerprint.digest, call_id)
        elif not attempt.delivered:
            self._undelivered[call_id] = fingerprint.digest
            while len(self._undelivered) > MAX_UNDELIVERED:
                self._undelivered.popitem(last=False)

    def _remember(self, key: str, digest: str, call_id: str) -> None:
        self._recorded[key] = digest, call_id
        self._recorded.move_to_end(key)
        while len(self._recorded) > MAX_KEYS:
            self._recorded.popitem(last=False)


def _is_being_recorded(original: Attempt, retry: RequestFingerprint) -> bool:
    return retry.is_retry and original.is_recording and original.fingerprint.digest == retry.digest


def choice_id(call_id: str, index: int) -> str:
    return f"{call_id}-{index}" if index else call_id


def choice_index(call_id: str) -> int:
    return int(call_id.partition("-")[2] or 0)


def first_id(call_id: str) -> str:
    return call_id.partition("-")[0]


def fingerprint_of(headers: Mapping[str, str], path: str, body: bytes) -> RequestFingerprint:
    key = headers.get("idempotency-key", "").strip()
    IDEMPOTENCY_KEY.check(len(key))
    count = headers.get("x-stainless-retry-count", "").strip()
    digest = blake2b(body, digest_size=_DIGEST_BYTES, key=path.encode()[:64])
    return RequestFingerprint(key, count.isdecimal() and int(count) > 0, digest.hexdigest())


def _check(fingerprint: RequestFingerprint, digest: str) -> None:
    if fingerprint.digest != digest:
        message = f"the Idempotency-Key {fingerprint.key!r} was used for another request; use a new key"
        raise GatewayError(422, "idempotency_key_reused", message)
