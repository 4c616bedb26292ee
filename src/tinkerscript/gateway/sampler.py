"""The `Sampler` seam: token ids in; token ids, log probabilities and the stop reason out.

`ScriptedSampler` is the in-memory fake that the tests and benchmarks use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from tinkerscript.rollouts.call import LogprobKind, StopReason, pack_ids, pack_logprobs, unpack_ids


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to sample; lengths are in tokens."""

    prompt: bytes
    """Prompt ids (int32)."""

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 for no limit."""

    seed: int | None = None
    stop_token_ids: list[int] = []
    stop: list[str] = []
    """Stop strings; sampling ends with the token that completes one."""


class SampledSequence(msgspec.Struct, frozen=True, kw_only=True):
    sampled: bytes
    """Sampled ids (int32), the stop token included."""

    logprobs: bytes
    """One float32 for each sampled id."""

    stop_reason: StopReason


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    sequences: list[SampledSequence]
    policy_version: int
    logprob_kind: LogprobKind = "processed"


class Sampler(ABC):
    """Where the gateway's tokens come from."""

    @abstractmethod
    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample `request.num_samples` sequences.

        Raises GatewayError: 503 while the engine is away, 504 when it did not answer in time,
        400 `context_length_exceeded` for a prompt that does not fit.
        """


class ScriptedSampler(Sampler):
    """Answers with the ids that `script(prompt_ids)` returns; logprobs are -0.5 for each token."""

    def __init__(self, script: Callable[[list[int]], list[int]], *, policy_version: int = 0) -> None:
        self._script = script
        self.policy_version = policy_version
        self.requests: list[SampleRequest] = []
        """Every request received, in order: the oracle of the tests."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.requests.append(request)
        sequences = [self._one(request) for _ in range(request.num_samples)]
        return SampleResult(sequences=sequences, policy_version=self.policy_version)

    def _one(self, request: SampleRequest) -> SampledSequence:
        ids = self._script(unpack_ids(request.prompt).tolist())
        stop_reason: StopReason = "length" if len(ids) >= request.max_tokens else "stop"
        ids = ids[: request.max_tokens]
        return SampledSequence(
            sampled=pack_ids(ids), logprobs=pack_logprobs([-0.5] * len(ids)), stop_reason=stop_reason
        )
