"""The gateway's `ClaimBook`s: `LeasedClaims` for episodes, `ServedModel` for a model that only serves."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tinkerscript.access_tokens import ClaimKeys
from tinkerscript.errors import GatewayError, UnknownEpisodeError
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.ledger import Ledger
from tinkerscript.limits import KEPT_BYTES, KEPT_CALLS, KEPT_S, RECORDED_BYTES, SECTION
from tinkerscript.logs import now_about
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.book import EpisodeBook
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.metrics import ServerMetrics


def gateway_path(number: int) -> str:
    return f"/g/{number}"


class ServedModel(ClaimBook):
    """A model with one key for all callers (None: any key), which does not train.

    Calls are counted, not recorded; the latest stored calls stay in memory for their keys.
    """

    def __init__(
        self,
        token: str | None,
        metrics: ServerMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._metrics = metrics
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[float, Call]] = OrderedDict()
        """(key digest, call id) -> last use and call, least recently used first."""

        self._kept_bytes = 0

    async def open(self, key: str) -> OpenClaim:
        if self._token is not None and not hmac.compare_digest(key.encode(), self._token.encode()):
            raise _refused(key, "this API key does not open this model")
        return OpenClaim(hashlib.sha256(key.encode()).hexdigest(), 1, 0, continues=False)

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        for call in calls:
            self._metrics.count_call(call.reply_tokens)

    def keep(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        now = self._clock()
        for call in calls:
            self._kept[claim.episode_uuid, call.call_id] = now, call
            self._kept_bytes += call.size
        while self._kept and (
            len(self._kept) > KEPT_CALLS
            or self._kept_bytes > KEPT_BYTES
            or now - next(iter(self._kept.values()))[0] > KEPT_S
        ):
            _, (_, oldest) = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.size

    def kept(self, claim: OpenClaim, call_id: str) -> list[Call]:
        now, calls, wanted = self._clock(), list[Call](), call_id
        while wanted:
            used, call = self._kept.get((claim.episode_uuid, wanted), (-math.inf, None))
            if call is None or now - used > KEPT_S:
                return []
            calls.append(call)
            wanted = call.parent_id or ""
        for call in reversed(calls):
            name = claim.episode_uuid, call.call_id
            self._kept[name] = now, call
            self._kept.move_to_end(name)
        return calls[::-1]

    async def calls(self, claim: OpenClaim) -> list[Call]:
        return []


@dataclass(slots=True)
class _Usage:
    calls: int = 0
    tokens: int = 0
    bytes: int = 0
    calls_in_flight: int = 0
    tokens_in_flight: int = 0
    bytes_in_flight: int = 0
    began: deque[float] = field(default_factory=deque[float])
    oldest_version: int | None = None
    roles: dict[str, str] = field(default_factory=dict[str, str])  # By call id.

    def add(self, call: Call) -> None:
        self.roles[call.call_id] = call.role
        self.calls += 1
        self.tokens += call.reply_tokens
        self.bytes += call.size
        if call.is_foreign:
            return
        known = () if self.oldest_version is None else (self.oldest_version,)
        self.oldest_version = min(*call.policy_versions, *known, call.policy_version)


class LeasedClaims(ClaimBook):
    """Records calls before they are answered. A claim does not expire during a call or exceed its limits."""

    def __init__(
        self,
        book: EpisodeBook,
        ledger: Ledger,
        *,
        keys: ClaimKeys,
        metrics: ServerMetrics,
        max_calls: int,
        max_tokens: int,
        gateways: int = 0,
    ) -> None:
        self._gateways = gateways
        self._book = book
        self._ledger = ledger
        self._keys = keys
        self._metrics = metrics
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._usages: dict[tuple[str, int], _Usage] = {}
        """(episode uuid, attempt) -> usage, until `forget`."""

    def forget(self, episode_uuid: str, attempt: int) -> None:
        self._usages.pop((episode_uuid, attempt), None)

    async def open(self, key: str) -> OpenClaim:
        claim = self.opened(key)
        now_about(episode=claim.episode_uuid, attempt=claim.attempt)
        return claim

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> int:
        return self.reserve(claim, num_samples, max_tokens, num_bytes)

    def opened(self, key: str, *, gateway: int = 0) -> OpenClaim:
        """`gateway` is the process that asks, or 0. Raises GatewayError 421 for another process's claim."""
        claim = self._keys.opened_by(key)
        if claim is None:
            raise _refused(key, "this API key opens no claim on this server")
        if self._gateways and (owner := self._keys.gateway(*claim, of=self._gateways)) != gateway:
            raise _misdirected(owner, gateway)
        episode = self._held(claim.episode_uuid, claim.attempt)
        return OpenClaim(episode.uuid, episode.attempt, episode.policy_version)

    def reserve(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> int:
        episode = self._held(claim.episode_uuid, claim.attempt)
        usage = self._usages[claim.episode_uuid, claim.attempt]
        _check_bytes(usage, num_bytes)
        granted = self._granted(usage, num_samples, max_tokens)
        self._book.leases.begin_call(episode)
        usage.calls_in_flight += num_samples
        usage.tokens_in_flight += num_samples * granted
        usage.bytes_in_flight += num_bytes
        usage.began.append(time.monotonic())
        return granted

    def end(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> None:
        usage = self._usages.get((claim.episode_uuid, claim.attempt))
        if usage is None:
            return
        self._metrics.observe_call(time.monotonic() - usage.began.popleft())
        usage.calls_in_flight -= num_samples
        usage.tokens_in_flight -= num_samples * max_tokens
        usage.bytes_in_flight -= num_bytes
        self._book.leases.end_call(self._book.get(claim.episode_uuid), claim.attempt)

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        episode = self._held(claim.episode_uuid, claim.attempt)
        usage = self._usages[claim.episode_uuid, claim.attempt]
        for call in calls:
            self._ledger.put_call(episode.sequence, claim.attempt, call)
        await self._ledger.durable()
        self._held(claim.episode_uuid, claim.attempt)
        for call in calls:
            usage.add(call)
            self._metrics.count_call(call.reply_tokens)

    async def calls(self, claim: OpenClaim) -> list[Call]:
        (calls,) = await self._ledger.calls([(self._book.get(claim.episode_uuid).sequence, claim.attempt)])
        self._held(claim.episode_uuid, claim.attempt)
        self._usages.setdefault((claim.episode_uuid, claim.attempt), _usage_of(calls))
        return calls

    async def recorded(self, episode_uuid: str, attempt: int) -> list[Call]:
        (calls,) = await self._ledger.calls([(self._book.get(episode_uuid).sequence, attempt)])
        return calls

    async def roles_of_calls(self, episode: EpisodeRecord, attempt: int) -> Mapping[str, str]:
        """By call id. Reads a held claim's calls at most once, because that may take a second."""
        usage = self._usages.get((episode.uuid, attempt))
        if usage is None:
            usage = _usage_of(await self.recorded(episode.uuid, attempt))
            if not episode.why_lost(attempt):
                usage = self._usages.setdefault((episode.uuid, attempt), usage)
        return usage.roles

    async def oldest_version(self, episode: EpisodeRecord) -> int | None:
        usage = self._usages.get((episode.uuid, episode.attempt))
        if usage is None:
            (calls,) = await self._ledger.calls([(episode.sequence, episode.attempt)])
            usage = _usage_of(calls)
        return usage.oldest_version

    def _granted(self, usage: _Usage, number: int, max_tokens: int) -> int:
        """Limit `max_tokens` to what the claim has left for each of `number` samples."""
        calls_left, tokens_left = self._max_calls - usage.calls, self._max_tokens - usage.tokens
        if calls_left < number:
            raise _exceeded(f"{self._max_calls} model calls")
        if tokens_left < number:
            raise _exceeded(f"{self._max_tokens} sampled tokens ({SECTION}.max_tokens_per_claim)")
        granted = min(max_tokens, tokens_left // number)
        if number > calls_left - usage.calls_in_flight:
            raise _busy("model calls")
        if granted * number > tokens_left - usage.tokens_in_flight:
            raise _busy(f"{SECTION}.max_tokens_per_claim")
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


def _check_bytes(usage: _Usage, number: int) -> None:
    limit = RECORDED_BYTES.limit
    if usage.bytes + number > limit:
        raise RECORDED_BYTES.refusal(usage.bytes + number)
    if usage.bytes + usage.bytes_in_flight + number > limit:
        raise _busy(RECORDED_BYTES.name)


def _usage_of(calls: list[Call]) -> _Usage:
    usage = _Usage()
    for call in calls:
        usage.add(call)
    return usage


def _refused(key: str, why: str) -> GatewayError:
    missing = "send the API key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return GatewayError(401, "invalid_api_key", why if key else missing)


def _exceeded(limit: str) -> GatewayError:
    # OpenAI's clients would retry a 429.
    message = f"this claim has used its {limit}; end or abort the episode"
    return GatewayError(403, "claim_limit_exceeded", message)


def _misdirected(owner: int, gateway: int) -> GatewayError:
    here = f"{gateway_path(gateway)}/v1" if gateway else "/v1"
    message = (
        f"the claim of this key is served at {gateway_path(owner)}/v1, not at {here}: use the "
        "openai_base_url that came with the claim (interchange_server.processes)"
    )
    return GatewayError(421, "wrong_gateway", message)


def _busy(bound: str) -> GatewayError:
    message = f"calls in flight may use up this claim's {bound}; retry after they finish"
    return GatewayError(429, "claim_limit_reserved", message)
