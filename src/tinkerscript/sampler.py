"""The `Sampler` seam: token ids in; token ids, log probabilities and the stop reason out.

`testing.ScriptedSampler` is the fake for tests and benchmarks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import LogprobKind, PlacedImage, StopReason

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
    grammar: str
    """In llguidance's Lark dialect, up to an id that ends a turn."""

    asked_by: str  # Names the request's field in errors.


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: bytes  # int32
    images: list[PlacedImage] = []
    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 means no limit.
    min_p: float = 0.0
    """Minimum probability relative to the highest; 0: off."""

    repetition_penalty: float = 1.0
    """Divides logits of tokens in prompt or reply; 1: off."""

    seed: int | None = None
    stop_token_ids: list[int] = []
    extra_stop_ids: list[int] = []  # These also end this reply.
    stop: list[str] = []  # Sampling ends with the token that completes one.
    top_logprobs: int = 0  # Likely ids to report per position.
    constraint: Constraint | None = None
    stream: bool = False
    affinity: str = ""
    """The calling episode, for the machine that cached its earlier turns."""

    role: str = ""  # Empty: the policy.
    sampled: int = 0
    """Number of the prompt's last ids that other weights sampled for this reply."""

    known: int = 0
    """Number of the prompt's first ids that an earlier call recorded, so their experts are not returned."""


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    sampled: bytes = b""  # int32 [R], including the stop token
    logprobs: bytes = b""  # float32 [R]
    top_ids: bytes = b""
    """Likely ids per position, best first (int32 [R, request.top_logprobs])."""

    top_logprobs: bytes = b""  # float32 [R, request.top_logprobs]

    def span(self, start: int, end: int | None = None) -> dict[str, bytes]:
        """Return the fields of tokens [start, end)."""
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
    stop_reason: StopReason
    constrained: bytes = b""
    """`TokenConstraint` per sampled id (uint8 [R]). Empty: none, or an unknown effect."""

    experts: bytes = b""
    """Routers' choices (`Call.experts`) for the prompt from `SampleRequest.known` on and the R sampled ids.
    Empty: not recorded.
    """

    is_cut: bool = False
    """`Sampler.cut` ended it, so `stop_reason` means nothing."""

    spans: list[tuple[int, int]] = []
    """Like `Call.spans`, but also for a cut sequence of one version."""


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    sequences: list[SampledSequence]
    policy_version: int  # Version of the first token's weights.
    policy_version_end: int | None = None
    """The last token's version if weights changed at an unknown token."""

    logprob_kind: LogprobKind = "processed"
    seed: int | None = None  # None means unknown.


class Progress(SampledTokens, frozen=True, kw_only=True):
    """Tokens since the last report. Reports may be late, repeated, or missing."""

    index: int
    offset: int  # Tokens of the sequence before these.


# Called on the event loop. Must not block.
ProgressCallback = Callable[[Progress], None]


class SampleFunction(Protocol):
    def __call__(
        self, request: SampleRequest, progress: ProgressCallback | None = None
    ) -> Awaitable[SampleResult]: ...


class Sampler(ABC):
    @abstractmethod
    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Sample `request.num_samples` sequences.

        Calls `progress` as tokens are sampled, if it can stream.

        Raises GatewayError: 503 while the engine is unavailable, 504 without an answer in time, 400
        `context_length_exceeded` for a prompt that does not fit, 400 `unsupported_parameter`
        (`refuse_unsupported`).
        """

    def cut(self) -> None:  # noqa: B027 (most samplers have fixed weights)
        """End running samples, if possible, so that new weights continue them."""

    def hold(self) -> AbstractContextManager[Sampler]:
        """Return a sampler that keeps these weights in the context, despite `cut`."""
        return nullcontext(self)


def fitted(request: SampleRequest, max_context: int, engine: str) -> SampleRequest:
    """Shorten the reply to the context. Raises 400 `context_length_exceeded` without room."""
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
    images: bool = False,
) -> None:
    """Raise GatewayError 400 if `request` needs something that `engine` lacks.

    `mixed_stops`: both stop strings and extra stop ids.
    """
    refused = ""
    if request.images and not images:
        refused = "image_url"
    elif request.constraint is not None and not constraints:
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
