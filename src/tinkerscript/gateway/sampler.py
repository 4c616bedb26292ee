"""The `Sampler` seam: token ids in; token ids, log probabilities and the stop reason out.

`ScriptedSampler` is the in-memory fake that the tests and benchmarks use.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import LogprobKind, StopReason, pack_ids, pack_logprobs, unpack_ids


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What may be sampled: a grammar over the ids of the model."""

    grammar: str
    """In llguidance's Lark dialect. It ends with the ids that end a turn."""

    asked_by: str
    """The caller's field, to be named if the constraint cannot be honoured."""


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

    top_logprobs: int = 0
    """How many of the most probable ids to tell at each position."""

    constraint: Constraint | None = None
    stream: bool = False
    """Whether anybody wants to see the tokens as they are sampled."""


class SampledSequence(msgspec.Struct, frozen=True, kw_only=True):
    sampled: bytes
    """Sampled ids (int32), the stop token included."""

    logprobs: bytes
    """One float32 for each sampled id."""

    stop_reason: StopReason
    top_ids: bytes = b""
    """The most probable ids of each position (int32 [R, request.top_logprobs]), best first."""

    top_logprobs: bytes = b""
    """float32 [R, request.top_logprobs]"""


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    sequences: list[SampledSequence]
    policy_version: int
    """Of the first token."""

    policy_version_end: int | None = None
    """Of the last token, where the weights changed meanwhile; else None."""

    logprob_kind: LogprobKind = "processed"
    seed: int | None = None
    """That it was sampled with; None: not known."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were sampled since the last report. For the eyes: it may be late, repeated or missing."""

    index: int
    """Which of the request's sequences."""

    offset: int
    """Tokens of that sequence before these."""

    sampled: bytes
    """Sampled ids (int32)."""

    logprobs: bytes
    """One float32 for each sampled id."""

    top_ids: bytes = b""
    """As in `SampledSequence`, of these ids."""

    top_logprobs: bytes = b""


ProgressCallback = Callable[[Progress], None]
"""Who is told of progress. Called on the event loop that awaits the sample; must not block."""


class SampleFunction(Protocol):
    """`Sampler.sample` as a function."""

    def __call__(
        self, request: SampleRequest, progress: ProgressCallback | None = None
    ) -> Awaitable[SampleResult]: ...


class Sampler(ABC):
    """Where the gateway's tokens come from."""

    @abstractmethod
    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Sample `request.num_samples` sequences. The result alone is what is recorded.

        `progress`, if given and if the engine can, is told of tokens as they are sampled.

        Raises GatewayError: 503 while the engine is away, 504 when it did not answer in time,
        400 `context_length_exceeded` for a prompt that does not fit, 400 `unsupported_parameter` with the
        caller's field for a constraint or alternatives that the engine cannot give (`refuse_unsupported`).
        """


def refuse_unsupported(request: SampleRequest, engine: str, *, constraints: bool, top_logprobs: bool) -> None:
    """Raises GatewayError 400 if `request` asks `engine` for what it cannot do."""
    refused = ""
    if request.constraint is not None and not constraints:
        refused = request.constraint.asked_by
    elif request.top_logprobs and not top_logprobs:
        refused = "top_logprobs"
    if refused:
        message = f"{refused} is not supported by {engine}; leave it out"
        raise GatewayError(400, "unsupported_parameter", message, param=refused)


class ScriptedSampler(Sampler):
    """Answers with the ids that `script(prompt_ids)` returns; logprobs are -0.5 for each token.

    Progress is reported token by token, one turn of the event loop after the other. The most probable ids are
    the sampled one and those after it; a constraint is for the script to keep.
    """

    def __init__(self, script: Callable[[list[int]], list[int]], *, policy_version: int = 0) -> None:
        self._script = script
        self.policy_version = policy_version
        self.requests: list[SampleRequest] = []
        """Every request received, in order: the oracle of the tests."""

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
        places = range(request.top_logprobs)
        return SampledSequence(
            sampled=pack_ids(ids),
            logprobs=pack_logprobs([-0.5] * len(ids)),
            stop_reason=stop_reason,
            top_ids=pack_ids([token + place for token in ids for place in places]),
            top_logprobs=pack_logprobs([-0.5 - place for _ in ids for place in places]),
        )


def token_by_token(sequences: Sequence[SampledSequence]) -> Iterator[Progress]:
    """The reports of an engine that samples one token of every sequence at a time."""
    longest = max((len(sequence.sampled) for sequence in sequences), default=0)
    for start in range(0, longest, 4):
        for index, sequence in enumerate(sequences):
            if start < len(sequence.sampled):
                end, top = start + 4, len(sequence.top_ids) // len(sequence.sampled)
                yield Progress(
                    index=index,
                    offset=start // 4,
                    sampled=sequence.sampled[start:end],
                    logprobs=sequence.logprobs[start:end],
                    top_ids=sequence.top_ids[start * top : end * top],
                    top_logprobs=sequence.top_logprobs[start * top : end * top],
                )
