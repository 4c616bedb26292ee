"""The gateway's `ClaimBook`s: `LeasedClaims` over the server's episodes, `ServedModel` for a model that is
served only.

Invariant: only the claim that holds the lease calls the model, a claim does not expire while one of its calls
is in flight, no claim exceeds its limits of calls and tokens, and a call is recorded durably, under that
claim, before it is answered.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from tinkerscript.errors import GatewayError, UnknownEpisodeError
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.sampler import SampleRequest
from tinkerscript.rollouts.call import Call
from tinkerscript.server.auth import ClaimKeys
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.store.episode_store import EpisodeStore
from tinkerscript.tracing import call_span


class ServedModel(ClaimBook):
    """Callers whose calls do not train: one key for all of them; calls are counted but not recorded.

    `token` is the key; None accepts any. `metrics`: None for calls that are not counted either.
    """

    def __init__(self, token: str | None, metrics: ServerMetrics | None) -> None:
        self._token = token
        self._metrics = metrics

    def open(self, key: str) -> OpenClaim:
        if self._token is not None and not hmac.compare_digest(key.encode(), self._token.encode()):
            raise GatewayError(401, "invalid_api_key", "this API key does not open this model")
        return OpenClaim(uuid4().hex, 1, 0, continues=False)

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        if self._metrics is not None:
            for call in calls:
                self._metrics.count_call(len(call.sampled) // 4)

    async def calls(self, claim: OpenClaim) -> list[Call]:
        return []


@dataclass(frozen=True, slots=True)
class ClaimLimits:
    """What one claim may use."""

    max_calls: int
    """Recorded calls; each choice of a reply is one."""

    max_tokens: int
    """Sampled tokens."""


@dataclass(slots=True)
class _Usage:
    """What one claim has used, and what is reserved for its calls in flight."""

    calls: int = 0
    tokens: int = 0
    calls_in_flight: int = 0
    tokens_in_flight: int = 0
    oldest_version: int | None = None
    """Of the weights that sampled any of its calls; None before the first."""

    def add(self, call: Call) -> None:
        self.calls += 1
        self.tokens += len(call.sampled) // 4
        known = () if self.oldest_version is None else (self.oldest_version,)
        self.oldest_version = min(*call.policy_versions, *known, call.policy_version)


class LeasedClaims(ClaimBook):
    """Opens the keys derived from this server's secret, while their claims hold the lease."""

    def __init__(
        self,
        book: EpisodeBook,
        store: EpisodeStore,
        *,
        keys: ClaimKeys,
        metrics: ServerMetrics,
        limits: ClaimLimits,
    ) -> None:
        self._book = book
        self._store = store
        self._keys = keys
        self._metrics = metrics
        self._limits = limits
        self._usages: dict[tuple[str, int], _Usage] = {}
        """(episode uuid, attempt) -> usage, from `calls` until `forget`."""

    def forget(self, episode_uuid: str, attempt: int) -> None:
        """Drop the usage of a claim that is over."""
        self._usages.pop((episode_uuid, attempt), None)

    def open(self, key: str) -> OpenClaim:
        claim = self._keys.opened_by(key)
        if claim is None:
            raise GatewayError(401, "invalid_api_key", "this API key opens no claim on this server")
        episode = self._held(claim.episode_uuid, claim.attempt)
        return OpenClaim(episode.uuid, episode.attempt, episode.policy_version)

    @contextmanager
    def in_flight(self, claim: OpenClaim, request: SampleRequest) -> Generator[SampleRequest]:
        episode = self._held(claim.episode_uuid, claim.attempt)
        usage = self._usages[claim.episode_uuid, claim.attempt]
        granted = self._granted(usage, request)
        number, tokens = request.num_samples, granted.max_tokens * request.num_samples
        self._book.leases.begin_call(episode)
        usage.calls_in_flight += number
        usage.tokens_in_flight += tokens
        began = time.monotonic()
        try:
            with call_span(claim.episode_uuid, claim.attempt, prompt_tokens=len(request.prompt) // 4):
                yield granted
        finally:
            self._metrics.observe_call(time.monotonic() - began)
            usage.calls_in_flight -= number
            usage.tokens_in_flight -= tokens
            self._book.leases.end_call(episode, claim.attempt)

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        episode = self._held(claim.episode_uuid, claim.attempt)
        usage = self._usages[claim.episode_uuid, claim.attempt]
        for call in calls:  # Writes of one tick share a transaction.
            self._store.add_call(episode, claim.attempt, call)
        await self._store.durable()
        self._held(claim.episode_uuid, claim.attempt)
        for call in calls:
            usage.add(call)
            self._metrics.count_call(len(call.sampled) // 4)

    async def calls(self, claim: OpenClaim) -> list[Call]:
        (calls,) = await self._store.calls([(self._book.get(claim.episode_uuid), claim.attempt)])
        self._held(claim.episode_uuid, claim.attempt)
        self._usages.setdefault((claim.episode_uuid, claim.attempt), _usage_of(calls))
        return calls

    async def recorded(self, episode_uuid: str, attempt: int) -> list[Call]:
        """The calls of a claim as they are stored, whether it holds its lease or not.

        Raises UnknownEpisodeError.
        """
        (calls,) = await self._store.calls([(self._book.get(episode_uuid), attempt)])
        return calls

    async def oldest_version(self, episode: EpisodeRecord) -> int | None:
        """The policy version of the oldest call of the episode's last claim; None before the first call."""
        usage = self._usages.get((episode.uuid, episode.attempt))
        if usage is None:
            (calls,) = await self._store.calls([(episode, episode.attempt)])
            usage = _usage_of(calls)
        return usage.oldest_version

    def _granted(self, usage: _Usage, request: SampleRequest) -> SampleRequest:
        """`request`, limited to the tokens that the claim has left.

        Raises GatewayError: 403 `claim_limit_exceeded`, or 429 while the rest is reserved for calls in
        flight.
        """
        limits, number = self._limits, request.num_samples
        calls_left, tokens_left = limits.max_calls - usage.calls, limits.max_tokens - usage.tokens
        if calls_left < number:
            raise _exceeded(f"{limits.max_calls} model calls", "max_calls_per_claim")
        if tokens_left < number:
            raise _exceeded(f"{limits.max_tokens} sampled tokens", "max_tokens_per_claim")
        max_tokens = min(request.max_tokens, tokens_left // number)
        if number > calls_left - usage.calls_in_flight:
            raise _busy("max_calls_per_claim")
        if max_tokens * number > tokens_left - usage.tokens_in_flight:
            raise _busy("max_tokens_per_claim")
        return msgspec.structs.replace(request, max_tokens=max_tokens)

    def _held(self, uuid: str, attempt: int) -> EpisodeRecord:
        try:
            episode = self._book.get(uuid)
        except UnknownEpisodeError as error:
            raise GatewayError(409, "claim_lost", str(error)) from error
        if lost := episode.why_lost(attempt):
            raise GatewayError(409, "claim_lost", lost)
        self._book.leases.renew(episode)
        return episode


def _usage_of(calls: list[Call]) -> _Usage:
    usage = _Usage()
    for call in calls:
        usage.add(call)
    return usage


def _exceeded(limit: str, key: str) -> GatewayError:
    # 403, because OpenAI's clients retry a 429.
    message = f"this claim has used its {limit} (interchange_server.{key}); end or abort the episode"
    return GatewayError(403, "claim_limit_exceeded", message)


def _busy(key: str) -> GatewayError:
    message = f"calls in flight may use up this claim's interchange_server.{key}; retry after they finish"
    return GatewayError(429, "claim_limit_reserved", message)
