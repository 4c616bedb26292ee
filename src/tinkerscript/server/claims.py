"""The gateway's `ClaimBook`s: `LeasedClaims` over the server's episodes, `ServedModel` for a model that is
served only.

Invariant: only the claim that holds the lease calls the model, a claim does not expire while one of its calls
is in flight, no claim exceeds its limits of calls and tokens, and a call is recorded durably, under that
claim, before it is answered.
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from tinkerscript.errors import GatewayError, UnknownEpisodeError
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.logs import now_about
from tinkerscript.rollouts.call import Call
from tinkerscript.server.auth import ClaimKeys
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.server.store.episode_store import EpisodeStore


def gateway_path(number: int) -> str:
    """Where a gateway process serves the models."""
    return f"/g/{number}"


class ServedModel(ClaimBook):
    """Callers whose calls do not train: one key for all of them; calls are counted but not recorded.

    `token` is the key; None accepts any. `metrics`: None for calls that are not counted either.
    """

    def __init__(self, token: str | None, metrics: ServerMetrics | None) -> None:
        self._token = token
        self._metrics = metrics

    async def open(self, key: str) -> OpenClaim:
        if self._token is not None and not hmac.compare_digest(key.encode(), self._token.encode()):
            raise GatewayError(401, "invalid_api_key", "this API key does not open this model")
        return OpenClaim(uuid4().hex, 1, 0, continues=False)

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        if self._metrics is not None:
            for call in calls:
                self._metrics.count_call(call.reply_tokens)

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
    began: deque[float] = field(default_factory=deque[float])
    """When calls in flight began, oldest first."""

    oldest_version: int | None = None
    """Of the weights that sampled any of its calls; None before the first."""

    def add(self, call: Call) -> None:
        self.calls += 1
        self.tokens += call.reply_tokens
        if call.is_foreign:
            return
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
        gateways: int = 0,
    ) -> None:
        """`gateways`: processes that own the claims; 0: the server's own process does."""
        self._gateways = gateways
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

    async def open(self, key: str) -> OpenClaim:
        claim = self.opened(key)
        now_about(episode=claim.episode_uuid, attempt=claim.attempt)
        return claim

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int) -> int:
        return self.reserve(claim, num_samples, max_tokens)

    def opened(self, key: str, *, gateway: int = 0) -> OpenClaim:
        """What `open` returns to a gateway process; 0 is the server's own.

        Raises GatewayError 421 `wrong_gateway` for a claim of another one, besides what `open` raises.
        """
        claim = self._keys.opened_by(key)
        if claim is None:
            raise GatewayError(401, "invalid_api_key", "this API key opens no claim on this server")
        if self._gateways and (owner := self._keys.gateway(*claim, of=self._gateways)) != gateway:
            raise _misdirected(owner, gateway)
        episode = self._held(claim.episode_uuid, claim.attempt)
        return OpenClaim(episode.uuid, episode.attempt, episode.policy_version)

    def reserve(self, claim: OpenClaim, num_samples: int, max_tokens: int) -> int:
        """What `begin` returns."""
        episode = self._held(claim.episode_uuid, claim.attempt)
        usage = self._usages[claim.episode_uuid, claim.attempt]
        granted = self._granted(usage, num_samples, max_tokens)
        self._book.leases.begin_call(episode)
        usage.calls_in_flight += num_samples
        usage.tokens_in_flight += num_samples * granted
        usage.began.append(time.monotonic())
        return granted

    def end(self, claim: OpenClaim, num_samples: int, max_tokens: int) -> None:
        usage = self._usages.get((claim.episode_uuid, claim.attempt))
        if usage is None:  # The claim is over.
            return
        self._metrics.observe_call(time.monotonic() - usage.began.popleft())
        usage.calls_in_flight -= num_samples
        usage.tokens_in_flight -= num_samples * max_tokens
        self._book.leases.end_call(self._book.get(claim.episode_uuid), claim.attempt)

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        episode = self._held(claim.episode_uuid, claim.attempt)
        usage = self._usages[claim.episode_uuid, claim.attempt]
        for call in calls:  # Writes of one tick share a transaction.
            self._store.add_call(episode, claim.attempt, call)
        await self._store.durable()
        self._held(claim.episode_uuid, claim.attempt)
        for call in calls:
            usage.add(call)
            self._metrics.count_call(call.reply_tokens)

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

    def _granted(self, usage: _Usage, number: int, max_tokens: int) -> int:
        """`max_tokens`, or for each of the `number` samples its share of what the claim has left.

        Raises GatewayError: 403 `claim_limit_exceeded`, or 429 while the rest is reserved for calls in
        flight.
        """
        limits = self._limits
        calls_left, tokens_left = limits.max_calls - usage.calls, limits.max_tokens - usage.tokens
        if calls_left < number:
            raise _exceeded(f"{limits.max_calls} model calls", "max_calls_per_claim")
        if tokens_left < number:
            raise _exceeded(f"{limits.max_tokens} sampled tokens", "max_tokens_per_claim")
        granted = min(max_tokens, tokens_left // number)
        if number > calls_left - usage.calls_in_flight:
            raise _busy("max_calls_per_claim")
        if granted * number > tokens_left - usage.tokens_in_flight:
            raise _busy("max_tokens_per_claim")
        return granted

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


def _misdirected(owner: int, gateway: int) -> GatewayError:
    here = f"{gateway_path(gateway)}/v1" if gateway else "/v1"
    message = (
        f"the claim of this key is served at {gateway_path(owner)}/v1, not at {here}: use the "
        "openai_base_url that came with the claim (interchange_server.processes)"
    )
    return GatewayError(421, "wrong_gateway", message)


def _busy(key: str) -> GatewayError:
    message = f"calls in flight may use up this claim's interchange_server.{key}; retry after they finish"
    return GatewayError(429, "claim_limit_reserved", message)
