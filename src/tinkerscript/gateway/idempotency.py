"""`IdempotencyCache`: which requests of a claim repeat another one, and get its reply.

A request repeats another one in two cases; in every other case both are sampled:

1. Both have the same `Idempotency-Key`. While the first one is in flight the others wait for it, and if it
   fails, one of them takes its place; once it is recorded they get the recorded reply, also after a restart
   of the server, since calls keep the key. The same key with another body is refused with 422.
2. The later one is marked as a retry (`x-stainless-retry-count` above 0, as OpenAI's and Anthropic's clients
   do), has the same body byte for byte, and there is an original that was recorded but whose client
   disconnected before the reply was sent. While an original is being recorded, the retry waits to learn
   which. An original serves one such retry, and none after a restart.

If the client disconnects during sampling, sampling stops and nothing is recorded, so a retry is sampled. A
reply that cannot be reproduced (`recorded_completion`) is sampled again. Memory is bounded per claim and
freed with it.
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
"""Idempotency keys kept per claim; the oldest are dropped first."""


MAX_UNDELIVERED = 64
"""Undelivered replies kept per claim; the oldest are dropped first."""


_DIGEST_BYTES = 16


class RequestFingerprint(msgspec.Struct, frozen=True):
    """What identifies a request among its repetitions."""

    key: str
    """The `Idempotency-Key`; "" if there is none."""

    is_retry: bool
    digest: str
    """Hex digest of route and body."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A request that is being sampled."""

    fingerprint: RequestFingerprint
    call_id: str | None = None
    """Id of the first choice's call, once all choices are recorded."""

    is_recording: bool = False
    """Whether its sample is complete, so that it is recorded even if its client disconnects."""

    delivered: bool = False
    """Whether the reply was sent to a caller that was still connected."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the attempt ends, whether it succeeded or failed."""


class IdempotencyCache:
    """The requests of one claim that later ones may repeat."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        """`calls`: those that the claim recorded before a restart, oldest first."""
        self._in_flight: dict[str, Attempt] = {}
        """By idempotency key."""

        self._keyless: list[Attempt] = []
        """Requests in flight without a key."""

        self._recorded: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Idempotency key -> digest of its request, id of the first choice's call."""

        self._undelivered: OrderedDict[str, str] = OrderedDict()
        """Id of the first choice's call -> digest of its request."""

        for call in calls:
            if call.idempotency_key:
                self._remember(call.idempotency_key, call.request_digest, first_id(call.call_id))

    def in_flight(self, fingerprint: RequestFingerprint) -> Attempt | None:
        """The attempt that a request must wait for. Raises GatewayError 422 for a reused key."""
        if not fingerprint.key:
            return next((each for each in self._keyless if _is_being_recorded(each, fingerprint)), None)
        attempt = self._in_flight.get(fingerprint.key)
        if attempt is not None:
            _check(fingerprint, attempt.fingerprint.digest)
        return attempt

    def take(self, fingerprint: RequestFingerprint) -> str | None:
        """The first choice's call of the recorded request that this one repeats, if any. An undelivered
        reply is taken once.

        Raises GatewayError 422 for a reused key.
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
        """A context in which a request is served."""
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
    """The id of the call behind one choice of a request; the first one is the id of the reply."""
    return f"{call_id}-{index}" if index else call_id


def choice_index(call_id: str) -> int:
    """Which choice of its request a call is behind."""
    return int(call_id.partition("-")[2] or 0)


def first_id(call_id: str) -> str:
    """The id of the first choice's call, given any choice's."""
    return call_id.partition("-")[0]


def fingerprint_of(headers: Mapping[str, str], path: str, body: bytes) -> RequestFingerprint:
    """The fingerprint of a request. Raises GatewayError 400 for a key that is too long."""
    key = headers.get("idempotency-key", "").strip()
    IDEMPOTENCY_KEY.check(len(key))
    count = headers.get("x-stainless-retry-count", "").strip()
    digest = blake2b(body, digest_size=_DIGEST_BYTES, key=path.encode()[:64])
    return RequestFingerprint(key, count.isdecimal() and int(count) > 0, digest.hexdigest())


def _check(fingerprint: RequestFingerprint, digest: str) -> None:
    if fingerprint.digest != digest:
        message = f"the Idempotency-Key {fingerprint.key!r} was used for another request; use a new key"
        raise GatewayError(422, "idempotency_key_reused", message)
