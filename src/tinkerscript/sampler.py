"""The `Sampler` seam: token ids in; token ids, log probabilities, and the stop reason out.

Invariant: tokens travel as ids. The result alone is recorded; progress is for display.

`testing.ScriptedSampler` is the in-memory fake that tests and benchmarks use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import LogprobKind, StopReason

__all__ = [
    "Constraint",
    "Progress",
    "ProgressCallback",
    "SampleFunction",
    "SampleRequest",
    "SampleResult",
    "SampledSequence",
    "SampledTokens",
    "Sampler",
    "fitted",
    "refuse_unsupported",
]


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar over the model's ids that limits what may be sampled."""

    grammar: str
    """In llguidance's Lark dialect. It ends with an id that ends a turn."""

    asked_by: str
    """The field of the caller's request to name in an error if the constraint is not supported."""


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampler needs to know; lengths are in tokens."""

    prompt: bytes
    """Prompt ids (int32)."""

    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: no limit."""

    min_p: float = 0.0
    """Leave out tokens less probable than this share of the most probable one's probability; 0: none."""

    repetition_penalty: float = 1.0
    """Divide the logits of tokens that the prompt or the reply already has; 1: none."""

    seed: int | None = None
    stop_token_ids: list[int] = []
    """Ids that end a turn."""

    extra_stop_ids: list[int] = []
    """Further ids that end this reply, as its caller wishes."""

    stop: list[str] = []
    """Stop strings; sampling ends with the token that completes one."""

    top_logprobs: int = 0
    """How many of the most likely ids to report at each position."""

    constraint: Constraint | None = None
    stream: bool = False
    """Whether to report progress."""

    affinity: str = ""
    """The episode that asks. A sampler of several machines answers it from one, which has its earlier turns
    cached."""

    role: str = ""
    """The role whose model is to sample; empty: the policy."""

    sampled: int = 0
    """How many of the prompt's last ids this reply has already: other weights have sampled them."""


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Some sampled tokens (R of them) and their log probabilities."""

    sampled: bytes = b""
    """Sampled ids (int32 [R]), the stop token included."""

    logprobs: bytes = b""
    """float32 [R]"""

    top_ids: bytes = b""
    """The most likely ids of each position, best first (int32 [R, request.top_logprobs])."""

    top_logprobs: bytes = b""
    """float32 [R, request.top_logprobs]"""

    def span(self, start: int, end: int | None = None) -> dict[str, bytes]:
        """The fields of the tokens [start, end), as arguments of another struct of tokens."""
        top = len(self.top_ids) // (len(self.sampled) or 1)
        one = slice(4 * start, None if end is None else 4 * end)
        each = slice(4 * top * start, None if end is None else 4 * top * end)
        return {
            "sampled": self.sampled[one],
            "logprobs": self.logprobs[one],
            "top_ids": self.top_ids[each],
            "top_logprobs": self.top_logprobs[each],
        }


class SampledSequence(SampledTokens, frozen=True, kw_only=True):
    """One sampled sequence, complete."""

    stop_reason: StopReason
    constrained: bytes = b""
    """What the request's constraint did to each sampled id (uint8 `TokenConstraint` [R]); empty: without a
    constraint nothing, with one unknown."""

    is_cut: bool = False
    """Whether `Sampler.cut` ended it: it is not complete, and `stop_reason` says nothing."""

    spans: list[tuple[int, int]] = []
    """`Call.spans`, also of a single version, if it was cut; else empty."""


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    """What answers a `SampleRequest`."""

    sequences: list[SampledSequence]
    policy_version: int
    """Of the weights that sampled the first token."""

    policy_version_end: int | None = None
    """Of the weights that sampled the last token, if they changed during the call at an unknown token; else
    None."""

    logprob_kind: LogprobKind = "processed"
    seed: int | None = None
    """The seed that was used; None: unknown."""


class Progress(SampledTokens, frozen=True, kw_only=True):
    """The tokens sampled since the last report, for display: reports may be late, repeated, or missing."""

    index: int
    """Which of the request's sequences."""

    offset: int
    """Tokens of that sequence before these."""


ProgressCallback = Callable[[Progress], None]
"""Called with each report, on the event loop that awaits the sample. Must not block."""


class SampleFunction(Protocol):
    """`Sampler.sample` as a function."""

    def __call__(
        self, request: SampleRequest, progress: ProgressCallback | None = None
    ) -> Awaitable[SampleResult]: ...


class Sampler(ABC):
    """The source of the gateway's tokens."""

    @abstractmethod
    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Sample `request.num_samples` sequences.

        Calls `progress`, if given, as tokens are sampled; a sampler that cannot stream ignores it.

        Raises GatewayError: 503 while the engine is unavailable, 504 if it did not answer in time, 400
        `context_length_exceeded` for a prompt that does not fit, 400 `unsupported_parameter` for what the
        engine does not support (`refuse_unsupported`).
        """

    def cut(self) -> None:  # noqa: B027 (most have weights that nothing takes the place of)
        """Newer weights are published: end what is being sampled by older ones where it is, if that can be
        done, so that the newer ones go on with it."""

    def hold(self) -> AbstractContextManager[Sampler]:
        """A sampler of the same weights, which samples from them as long as the context is open, and which
        `cut` leaves alone."""
        return nullcontext(self)


def fitted(request: SampleRequest, max_context: int, engine: str) -> SampleRequest:
    """`request`, no longer than the context has room for.

    Raises GatewayError 400 `context_length_exceeded` if there is no room.
    """
    length = len(request.prompt) // 4
    if length >= max_context:
        message = (
            f"{engine}'s context holds {max_context} tokens; the prompt has {length} and leaves no room for "
            "a reply"
        )
        raise GatewayError(400, "context_length_exceeded", message, param="messages")
    return msgspec.structs.replace(request, max_tokens=min(request.max_tokens, max_context - length))


def refuse_unsupported(
    request: SampleRequest,
    engine: str,
    *,
    constraints: bool,
    top_logprobs: bool,
    min_p: bool = False,
    repetition_penalty: bool = False,
    mixed_stops: bool = False,
) -> None:
    """Raise GatewayError 400 if `request` needs a feature that `engine` does not have.

    `mixed_stops`: stop strings and further stop ids in one request.
    """
    refused = ""
    if request.constraint is not None and not constraints:
        refused = request.constraint.asked_by
    elif request.top_logprobs and not top_logprobs:
        refused = "top_logprobs"
    elif request.min_p and not min_p:
        refused = "min_p"
    elif request.repetition_penalty != 1 and not repetition_penalty:
        refused = "repetition_penalty"
    elif request.stop and request.extra_stop_ids and not mixed_stops:
        refused = "stop_token_ids"
    if refused:
        message = f"{refused} is not supported by {engine}; leave it out"
        raise GatewayError(400, "unsupported_parameter", message, param=refused)
