"""The seam between the gateway and whoever keeps the episodes: keys in, claims out, calls recorded.

The server implements `ClaimBook` over its episodes; `MemoryClaimBook` is the in-memory fake.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.sampler import SampleRequest
from tinkerscript.rollouts.call import Call


@dataclass(frozen=True, slots=True)
class OpenClaim:
    """A claim that holds the lease of its episode."""

    episode_uuid: str
    attempt: int
    policy_version: int
    """Policy version when the episode was claimed."""

    continues: bool = True
    """Whether later calls of this claim may extend this one; False for a model that is only served."""


class ClaimBook(ABC):
    """Who may call the model, and where calls are kept."""

    @abstractmethod
    def open(self, key: str) -> OpenClaim:
        """The claim that `key` opens; renews its lease.

        Raises GatewayError: 401 `invalid_api_key` for a key that is not ours, 409 `claim_lost`
        with the reason when the claim no longer holds the lease.
        """

    def in_flight(self, claim: OpenClaim, request: SampleRequest) -> AbstractContextManager[SampleRequest]:
        """While the context is open `claim`, whose `calls` were read, samples, and does not lapse for want of
        activity.

        Gives `request`, with `max_tokens` lowered to what the claim may still sample. Entering raises
        GatewayError: 409 `claim_lost`, 403 `claim_limit_exceeded` for a claim that has used up its calls or
        tokens, 429 while calls in flight may use them up.
        """
        return nullcontext(request)

    @abstractmethod
    async def record(self, claim: OpenClaim, call: Call) -> None:
        """Store `call` durably and renew the lease.

        Raises GatewayError 409 `claim_lost` if the claim lost the lease meanwhile; nothing is stored then.
        """

    @abstractmethod
    async def calls(self, claim: OpenClaim) -> list[Call]:
        """The calls recorded for this claim, oldest first (to restore a session after a restart).

        Raises GatewayError 409 `claim_lost` if the claim lost the lease meanwhile.
        """


class MemoryClaimBook(ClaimBook):
    """Keeps claims and calls in memory. `lose` makes a claim lose its lease."""

    def __init__(self, claims: dict[str, OpenClaim]) -> None:
        self._claims = claims
        self._lost: dict[OpenClaim, str] = {}
        self.recorded: dict[OpenClaim, list[Call]] = {claim: [] for claim in claims.values()}

    def lose(self, claim: OpenClaim, reason: str) -> None:
        """From now on `claim` is refused with `reason`."""
        self._lost[claim] = reason

    def open(self, key: str) -> OpenClaim:
        if key not in self._claims:
            raise GatewayError(401, "invalid_api_key", "this API key opens no claim on this server")
        claim = self._claims[key]
        self._check(claim)
        return claim

    async def record(self, claim: OpenClaim, call: Call) -> None:
        self._check(claim)
        self.recorded[claim].append(call)

    async def calls(self, claim: OpenClaim) -> list[Call]:
        return list(self.recorded[claim])

    def _check(self, claim: OpenClaim) -> None:
        if claim in self._lost:
            raise GatewayError(409, "claim_lost", self._lost[claim])
