"""The roles of a run: which model a request's `model` names, and the claims as one role sees them.

Invariants: only a role's name, letter for letter, reaches it; every other name is the policy's, or unknown. A
call carries the name of its role, and no model sees the calls of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.gateway.named_model import NamedModel
from tinkerscript.gateway.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.rollouts.call import Call, calls_of


class _Named(msgspec.Struct):
    """What a request of any wire format says about its model."""

    model: object = None


_READ_NAME = msgspec.json.Decoder(_Named).decode


class RoleNames:
    """The models that requests may name besides the policy."""

    def __init__(self, endpoints: Mapping[str, NamedModel]) -> None:
        self.endpoints = endpoints

    def named_in(self, body: bytes) -> NamedModel | None:
        """The model of the role that a request names; None for the policy, which refuses what is no
        request."""
        if not self.endpoints:
            return None
        try:
            name = _READ_NAME(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return self.endpoints.get(name) if isinstance(name, str) else None


class RoleClaims(ClaimBook):
    """The claims, with the calls of one role alone. They count toward the claim's limits like all others."""

    def __init__(self, claims: ClaimBook, role: str) -> None:
        """`role`: empty for the policy."""
        self._claims = claims
        self._role = role

    async def open(self, key: str) -> OpenClaim:
        return await self._claims.open(key)

    async def begin(self, claim: OpenClaim, num_samples: int, max_tokens: int) -> int:
        return await self._claims.begin(claim, num_samples, max_tokens)

    def end(self, claim: OpenClaim, num_samples: int, max_tokens: int) -> None:
        self._claims.end(claim, num_samples, max_tokens)

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        if self._role:
            calls = [msgspec.structs.replace(call, role=self._role) for call in calls]
        await self._claims.record(claim, calls)

    async def calls(self, claim: OpenClaim) -> list[Call]:
        return calls_of(await self._claims.calls(claim), self._role)


class RoleSampler(Sampler):
    """What samples for the policy, asked for a role."""

    def __init__(self, sampler: Sampler, role: str) -> None:
        self._sampler = sampler
        self._role = role

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        return await self._sampler.sample(msgspec.structs.replace(request, role=self._role), progress)
