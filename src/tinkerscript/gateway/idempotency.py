"""`IdempotencyCache`: which requests of a claim are one call, and which only look alike.

A request repeats another one, and gets its answer, in two cases; in every other case both are sampled:

1. Both carry the same `Idempotency-Key`. While the first one is in flight the others wait for it, and one of
   them takes its place if it fails; once it is recorded they get what was recorded, also after a restart of
   the server, since calls keep the key. The same key with another body is refused with 422.
2. The later one says that it is a retry (`x-stainless-retry-count` above 0, as the clients of OpenAI and
   Anthropic do), its body is the same byte for byte, and there is an original that was recorded but whose
   client hung up before the reply was written. An original answers one such retry, and none after a restart.

A request whose client hangs up while it is sampled is no original: sampling stops and nothing is recorded, so
the retry is sampled. An answer that cannot be made again (`answers`) is sampled again. Memory is bounded for
each claim and goes with it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import Call

MAX_KEYS = 1024
"""Idempotency keys that are remembered for each claim; the oldest go first."""


MAX_UNDELIVERED = 64
"""Answers of each claim that wait for a retry; the oldest go first."""


MAX_KEY_LENGTH = 255


_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class RequestFingerprint:
    """What a request says of being one of several."""

    key: str
    """The idempotency key, or ""."""

    is_retry: bool
    digest: str
    """Of route and body; hexadecimal."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A request that is being sampled."""

    mark: RequestFingerprint
    call_id: str | None = None
    """The call of its first choice, once all choices are recorded."""

    delivered: bool = False
    """Whether the reply was written to a caller that was still there."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the attempt is over, however it ended."""


class IdempotencyCache:
    """The requests of one claim that others may repeat."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        """`calls`: what the claim recorded before a restart, oldest first."""
        self._in_flight: dict[str, Attempt] = {}
        self._recorded: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Idempotency key -> digest of the request, id of its first call."""

        self._undelivered: OrderedDict[str, str] = OrderedDict()
        """Id of the first call -> digest of its request."""

        for call in calls:
            if call.idempotency_key:
                self._remember(call.idempotency_key, call.request_digest, first_id(call.call_id))

    def in_flight(self, mark: RequestFingerprint) -> Attempt | None:
        """The attempt that a request must wait for. Raises GatewayError 422."""
        attempt = self._in_flight.get(mark.key)
        if attempt is not None:
            _check(mark, attempt.mark.digest)
        return attempt

    def take(self, mark: RequestFingerprint) -> str | None:
        """The first call of the recorded original that a request repeats. Raises GatewayError 422."""
        if mark.key:
            digest, call_id = self._recorded.get(mark.key, (mark.digest, None))
            _check(mark, digest)
            return call_id
        if not mark.is_retry:
            return None
        call_id = next((each for each, digest in self._undelivered.items() if digest == mark.digest), None)
        if call_id is not None:
            del self._undelivered[call_id]
        return call_id

    @contextmanager
    def attempt(self, mark: RequestFingerprint) -> Generator[Attempt]:
        """A request that is answered while the context is open."""
        attempt = Attempt(mark)
        if mark.key:
            self._in_flight[mark.key] = attempt
        try:
            yield attempt
        finally:
            if mark.key:
                del self._in_flight[mark.key]
            self._settle(attempt)
            attempt.over.set()

    def _settle(self, attempt: Attempt) -> None:
        call_id, mark = attempt.call_id, attempt.mark
        if call_id is None:
            return
        if mark.key:
            self._remember(mark.key, mark.digest, call_id)
        elif not attempt.delivered:
            self._undelivered[call_id] = mark.digest
            while len(self._undelivered) > MAX_UNDELIVERED:
                self._undelivered.popitem(last=False)

    def _remember(self, key: str, digest: str, call_id: str) -> None:
        self._recorded[key] = digest, call_id
        self._recorded.move_to_end(key)
        while len(self._recorded) > MAX_KEYS:
            self._recorded.popitem(last=False)


def choice_id(call_id: str, index: int) -> str:
    """The id of the call behind one choice of a request; the first one's names the reply."""
    return f"{call_id}-{index}" if index else call_id


def first_id(call_id: str) -> str:
    """The id of the first choice's call, of any choice's."""
    return call_id.partition("-")[0]


def read_mark(headers: Mapping[str, str], path: str, body: bytes) -> RequestFingerprint:
    """The mark of a request. Raises GatewayError 400 for a key that is too long."""
    key = headers.get("idempotency-key", "").strip()
    if len(key) > MAX_KEY_LENGTH:
        message = f"the Idempotency-Key has {len(key)} characters; use at most {MAX_KEY_LENGTH}"
        raise GatewayError(400, "invalid_idempotency_key", message)
    count = headers.get("x-stainless-retry-count", "").strip()
    digest = blake2b(body, digest_size=_DIGEST_BYTES, key=path.encode()[:64])
    return RequestFingerprint(key, count.isdecimal() and int(count) > 0, digest.hexdigest())


def _check(mark: RequestFingerprint, digest: str) -> None:
    if mark.digest != digest:
        message = f"the Idempotency-Key {mark.key!r} came with another request before; use a new key"
        raise GatewayError(422, "idempotency_key_reused", message)
