"""The roles of a run: which model a request's `model` names, and what samples for one.

Invariant: only a role's name, letter for letter, reaches it; every other name is the policy's, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tinkerscript.gateway.named_model import NamedModel
from tinkerscript.gateway.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult


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
        try:
            name = _READ_NAME(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return self.endpoints.get(name) if isinstance(name, str) else None


class RoleSampler(Sampler):
    """What samples for the policy, asked for a role."""

    def __init__(self, sampler: Sampler, role: str) -> None:
        self._sampler = sampler
        self._role = role

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        return await self._sampler.sample(msgspec.structs.replace(request, role=self._role), progress)
