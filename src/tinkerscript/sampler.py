"""The `Sampler` seam: token ids in; token ids, log probabilities and the stop reason out.

Tokens travel as ids. Only results are recorded; progress is for display. `testing.ScriptedSampler` is the
fake for tests and benchmarks.
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
    """A grammar that limits what may be sampled."""

    grammar: str
    """In llguidance's Lark dialect, ending with an id that ends a turn."""

    asked_by: str  # The request's field to blame.


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for samples. Lengths are in tokens."""

    prompt: bytes  # Ids (int32).
    images: list[PlacedImage] = []  # Of `prompt`.
    max_tokens: int
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: no limit.
    min_p: float = 0.0
    """Minimum probability, relative to the most probable token's. 0: off."""

    repetition_penalty: float = 1.0
    """Divides the logits of tokens already in prompt or reply. 1: off."""

    seed: int | None = None
    stop_token_ids: list[int] = []  # They end a turn.
    extra_stop_ids: list[int] = []  # They also end this reply, on the caller's request.
    stop: list[str] = []  # Sampling ends with the token that completes one.
    top_logprobs: int = 0  # Number of likely ids to report per position.
    constraint: Constraint | None = None
    stream: bool = False
    affinity: str = ""
    """The calling episode, so a sampler with several machines can use the one that cached its earlier
    turns."""

    role: str = ""  # Whose model samples. Empty: the policy.
    sampled: int = 0
    """How many of the prompt's last ids other weights sampled for this reply."""

    known: int = 0
    """How many of the prompt's first ids an earlier call recorded. Their experts are not returned again."""


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True):
    """R sampled tokens with log probabilities."""

    sampled: bytes = b""  # Ids (int32 [R]), including the stop token.
    logprobs: bytes = b""  # float32 [R]
    top_ids: bytes = b""
    """Likely ids per position, best first (int32 [R, request.top_logprobs])."""

    top_logprobs: bytes = b""  # float32 [R, request.top_logprobs]

    def span(self, start: int, end: int | None = None) -> dict[str, bytes]:
        """Return the fields of tokens [start, end) for another struct."""
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
    """`TokenConstraint` per sampled id (uint8 [R]). Empty: no constraint, or with one, unknown."""

    experts: bytes = b""
    """What a mixture's routers chose (`Call.experts`), for the prompt from `SampleRequest.known` on and the
    R sampled ids. Empty: not recorded."""

    is_cut: bool = False
    """`Sampler.cut` ended it, so it is incomplete and `stop_reason` means nothing."""

    spans: list[tuple[int, int]] = []
    """Like `Call.spans`, but if it was cut, a single version has an entry too. Otherwise empty."""


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    sequences: list[SampledSequence]
    policy_version: int  # Of the first token's weights.
    policy_version_end: int | None = None
    """Of the last token's weights, if they changed at an unknown token; otherwise None."""

    logprob_kind: LogprobKind = "processed"
    seed: int | None = None  # None: unknown.


class Progress(SampledTokens, frozen=True, kw_only=True):
    """Tokens sampled since the last report, for display. Reports may be late, repeated, or missing."""

    index: int  # Of the sequence in the request.
    offset: int  # Tokens of the sequence before these.


# Called on the event loop that awaits the sample. Must not block.
ProgressCallback = Callable[[Progress], None]


class SampleFunction(Protocol):
    def __call__(
        self, request: SampleRequest, progress: ProgressCallback | None = None
    ) -> Awaitable[SampleResult]: ...


class Sampler(ABC):
    @abstractmethod
    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Sample `request.num_samples` sequences.

        Calls `progress`, if given, as tokens are sampled; samplers that cannot stream ignore it.

        Raises GatewayError: 503 while the engine is unavailable, 504 if it did not answer in time, 400
        `context_length_exceeded` for a prompt that does not fit, 400 `unsupported_parameter` for an
        unsupported feature (`refuse_unsupported`).
        """

    def cut(self) -> None:  # noqa: B027 (most samplers have fixed weights)
        """End running samples, if possible, so that newly published weights continue them."""

    def hold(self) -> AbstractContextManager[Sampler]:
        """Return a sampler that keeps these weights while the context is open, unaffected by `cut`."""
        return nullcontext(self)


def fitted(request: SampleRequest, max_context: int, engine: str) -> SampleRequest:
    """Shorten `request` to fit the context.

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
    images: bool = False,
) -> None:
    """Raise GatewayError 400 if `engine` lacks a feature that `request` needs.

    `mixed_stops`: both stop strings and extra stop ids in one request.
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
