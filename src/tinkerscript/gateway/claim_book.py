"""`ClaimBook` is what the gateway needs from the server: it checks keys and stores calls.

A claim without its lease gets GatewayError 409 `claim_lost`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tinkerscript.rollouts.call import Call

__all__ = ["ClaimBook", "OpenClaim"]


@dataclass(frozen=True, slots=True)
class OpenClaim:
    episode_uuid: str
    attempt: int
    policy_version: int  # At the time of the claim.
    # If false, calls extend only calls given to `keep`.
    continues: bool = True


class ClaimBook(ABC):
    @abstractmethod
    async def open(self, key: str) -> OpenClaim:
        """Also renews the lease. Raises GatewayError 401 `invalid_api_key`."""

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0) -> int:
        """Reserve the claim's limits before sampling. The lease lasts until `end`.

        `num_bytes` is the record's size without samples. Returns the granted tokens per sample. Raises
        GatewayError 403 `claim_limit_exceeded`, and 429 if calls in flight may use up the limits.
        """
        return max_tokens

    def end(  # noqa: B027
        self, claim: OpenClaim, num_samples: int, max_tokens: int, num_bytes: int = 0
    ) -> None:
        """`max_tokens` is the number that `begin` returned."""

    @abstractmethod
    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        """Store one request's calls, all or none, and renew the lease."""

    def keep(self, claim: OpenClaim, calls: Sequence[Call]) -> None:  # noqa: B027
        """Let later requests name these recorded calls."""

    def kept(self, claim: OpenClaim, call_id: str) -> list[Call]:
        """Return a call given to `keep` after the calls it extends; empty if it is gone."""
        return []

    @abstractmethod
    async def calls(self, claim: OpenClaim) -> list[Call]:
        """Oldest first."""
