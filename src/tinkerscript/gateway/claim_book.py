"""The seam between the gateway and the episodes: keys in, claims out, calls recorded.

The server implements `ClaimBook` over its episodes; `testing.MemoryClaimBook` is the in-memory fake.
Invariant: a call is recorded only for a claim that still holds its lease.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tinkerscript.rollouts.call import Call

__all__ = ["ClaimBook", "OpenClaim"]


@dataclass(frozen=True, slots=True)
class OpenClaim:
    """A claim that holds its episode's lease."""

    episode_uuid: str
    attempt: int
    policy_version: int
    """The policy version when the episode was claimed."""

    continues: bool = True
    """Whether later calls may extend any earlier one; False for a model that is served without episodes,
    whose calls extend only what `ClaimBook.keep` got."""


class ClaimBook(ABC):
    """Decides who may call the model, and stores the calls."""

    @abstractmethod
    async def open(self, key: str) -> OpenClaim:
        """The claim that `key` opens; renews its lease.

        Raises GatewayError: 401 `invalid_api_key` for an unknown key, 409 `claim_lost` with the reason if
        the claim no longer holds the lease.
        """

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> int:
        """`claim`, whose `calls` were read, is about to sample; its lease does not expire before `end`.

        `num_bytes`: what is recorded besides the samples. Returns how many tokens each of the samples may
        have: `max_tokens`, or what the claim has left. Raises GatewayError: 409 `claim_lost`, 403
        `claim_limit_exceeded` if the claim has used up its calls, tokens or bytes, 429 while calls in flight
        may use them up.
        """
        return max_tokens

    def end(  # noqa: B027
        self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0
    ) -> None:
        """What `begin` allowed, with as many tokens as it returned, is over."""

    @abstractmethod
    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        """Store the calls of one request durably, all or none, and renew the lease.

        Raises GatewayError 409 `claim_lost`, and stores nothing, if the claim has lost the lease.
        """

    def keep(self, claim: OpenClaim, calls: Sequence[Call]) -> None:  # noqa: B027
        """Let later requests name these recorded calls. A claim that continues keeps all of its calls."""

    def kept(self, claim: OpenClaim, call_id: str) -> list[Call]:
        """A call that was given to `keep` and those that it extends, oldest first; empty if it is gone."""
        return []

    @abstractmethod
    async def calls(self, claim: OpenClaim) -> list[Call]:
        """The calls recorded for this claim, oldest first, to restore its session after a restart.

        Raises GatewayError 409 `claim_lost` if the claim has lost the lease.
        """
