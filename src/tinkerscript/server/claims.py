"""The gateway's `ClaimBook` over the server's episodes: keys in, claims out, calls recorded.

Invariant: only the claim that holds the lease calls the model, and a call is recorded durably, under that
claim, before it is answered.
"""

from __future__ import annotations

import hmac
from typing import Protocol
from uuid import uuid4

from tinkerscript.errors import GatewayError, UnknownEpisodeError
from tinkerscript.gateway.claims import ClaimBook, OpenClaim
from tinkerscript.rollouts.call import Call
from tinkerscript.server.auth import claim_key, verify_key
from tinkerscript.server.episode import Episode
from tinkerscript.server.episodes import EpisodeBook
from tinkerscript.server.store import EpisodeStore


class CallCounter(Protocol):
    """Who counts the calls."""

    def count_call(self, sampled_tokens: int) -> None: ...


class ServedModel(ClaimBook):
    """For a model that is served and not trained: one key for all, nothing recorded, no history kept.

    `token` is the key; None accepts any.
    """

    def __init__(self, token: str | None, counter: CallCounter) -> None:
        self._token = token
        self._counter = counter

    def open(self, key: str) -> OpenClaim:
        if self._token is not None and not hmac.compare_digest(key.encode(), self._token.encode()):
            raise GatewayError(401, "invalid_api_key", "this API key does not open this model")
        return OpenClaim(uuid4().hex, 1, 0, continues=False)

    async def record(self, claim: OpenClaim, call: Call) -> None:
        self._counter.count_call(len(call.sampled) // 4)

    def calls(self, claim: OpenClaim) -> list[Call]:
        return []


class LeasedClaims(ClaimBook):
    """Opens keys that this server's secret made, while their claims hold the lease."""

    def __init__(
        self, book: EpisodeBook, store: EpisodeStore, *, secret: bytes, counter: CallCounter
    ) -> None:
        self._book = book
        self._store = store
        self._secret = secret
        self._counter = counter

    def key(self, episode: Episode) -> str:
        """The API key of the episode's last claim."""
        return claim_key(self._secret, episode.uuid, episode.attempt)

    def open(self, key: str) -> OpenClaim:
        claim = verify_key(self._secret, key)
        if claim is None:
            raise GatewayError(401, "invalid_api_key", "this API key opens no claim on this server")
        episode = self._held(claim.episode_uuid, claim.attempt)
        return OpenClaim(episode.uuid, episode.attempt, episode.policy_version)

    async def record(self, claim: OpenClaim, call: Call) -> None:
        episode = self._held(claim.episode_uuid, claim.attempt)
        self._store.add_call(episode, claim.attempt, call)
        await self._store.durable()
        self._held(claim.episode_uuid, claim.attempt)
        self._counter.count_call(len(call.sampled) // 4)

    def calls(self, claim: OpenClaim) -> list[Call]:
        return self._store.calls(self._book.get(claim.episode_uuid), claim.attempt)

    def _held(self, uuid: str, attempt: int) -> Episode:
        try:
            episode = self._book.get(uuid)
        except UnknownEpisodeError as error:
            raise GatewayError(409, "claim_lost", str(error)) from error
        lost = self._book.why_lost(episode, attempt)
        if lost:
            raise GatewayError(409, "claim_lost", lost)
        self._book.renew(episode)
        return episode
