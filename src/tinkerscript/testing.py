"""In-memory implementations of TinkerScript's seams, for tests of your own code.

    ScriptedSampler    a `Sampler` that replies with the ids a function returns
    MemoryClaimBook    a `ClaimBook` for a gateway without a server
    QuietReporter      a `ProgressReporter` that records what it receives

Each keeps the contract of its seam and opens no file or socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tinkerscript.dashboard.progress import Phase, ProgressReporter
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.claim_book import ClaimBook, OpenClaim
from tinkerscript.rollouts.call import Call, StopReason, pack_ids, pack_logprobs, unpack_ids
from tinkerscript.sampler import (
    Progress,
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)

__all__ = [
    "MemoryClaimBook",
    "QuietReporter",
    "ScriptedSampler",
    "token_by_token",
]


class ScriptedSampler(Sampler):
    """Samples the ids that `script(prompt_ids)` returns, with logprobs of -0.5.

    Reports progress token by token. The likely ids are the sampled one and its successors. The script must
    respect constraints.
    """

    def __init__(self, script: Callable[[list[int]], list[int]], *, policy_version: int = 0) -> None:
        self._script = script
        self.policy_version = policy_version
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.requests.append(request)
        sequences = [self._one(request) for _ in range(request.num_samples)]
        if progress is not None:
            for report in token_by_token(sequences):
                progress(report)
                await asyncio.sleep(0)
        return SampleResult(sequences=sequences, policy_version=self.policy_version)

    def _one(self, request: SampleRequest) -> SampledSequence:
        ids = self._script(unpack_ids(request.prompt).tolist())
        stop_reason: StopReason = "length" if len(ids) >= request.max_tokens else "stop"
        ids = ids[: request.max_tokens]
        ranks = range(request.top_logprobs)
        return SampledSequence(
            sampled=pack_ids(ids),
            logprobs=pack_logprobs([-0.5] * len(ids)),
            stop_reason=stop_reason,
            top_ids=pack_ids([token + rank for token in ids for rank in ranks]),
            top_logprobs=pack_logprobs([-0.5 - rank for _ in ids for rank in ranks]),
        )


def token_by_token(sequences: Sequence[SampledSequence]) -> Iterator[Progress]:
    """Yield progress as if one token of every sequence were sampled at a time."""
    longest = max((len(sequence.sampled) // 4 for sequence in sequences), default=0)
    for offset in range(longest):
        for index, sequence in enumerate(sequences):
            if 4 * offset < len(sequence.sampled):
                yield Progress(index=index, offset=offset, **sequence.span(offset, offset + 1))


class MemoryClaimBook(ClaimBook):
    def __init__(self, claims: dict[str, OpenClaim]) -> None:
        self._claims = claims
        self._lost: dict[OpenClaim, str] = {}
        self.recorded: dict[OpenClaim, list[Call]] = {claim: [] for claim in claims.values()}

    def lose(self, claim: OpenClaim, reason: str) -> None:
        """Refuse `claim` from now on."""
        self._lost[claim] = reason

    async def open(self, key: str) -> OpenClaim:
        if key not in self._claims:
            raise GatewayError(401, "invalid_api_key", "this API key does not open a claim on this server")
        claim = self._claims[key]
        self._check(claim)
        return claim

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        self._check(claim)
        self.recorded[claim] += calls

    async def calls(self, claim: OpenClaim) -> list[Call]:
        return list(self.recorded[claim])

    def _check(self, claim: OpenClaim) -> None:
        if claim in self._lost:
            raise GatewayError(409, "claim_lost", self._lost[claim])


class QuietReporter(ProgressReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.waits: list[str] = []
        self.steps: list[dict[str, float]] = []
        self.scores: dict[str, float] = {}
        self.episodes = 0

    def begin(self, steps: int, *, done: int = 0) -> None:
        pass

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        self.waits.append(what)
        yield

    @contextmanager
    def phase(self, label: str, *, total: int) -> Generator[Phase]:
        yield self

    def advance(self, episodes: int) -> None:
        self.episodes += episodes

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(dict(metrics))

    def evaluation(self, label: str, score: float, episodes: int, failed: int) -> None:
        self.scores[label] = score

    def note(self, message: str) -> None:
        self.notes.append(message)
