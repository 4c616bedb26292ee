"""One request of the gateway as a call of an engine's sampling client.

Invariant: progress reaches the event loop that awaits the sample, in the order of the tokens; while the loop
is busy reports gather, and they are told in one go.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import tinker

from tinkerscript.engine.grammars import GrammarError
from tinkerscript.engine.running_batch import Alternatives, SampledRow
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.errors import AlignmentError, EngineError, GatewayError
from tinkerscript.gateway.sampler import (
    Constraint,
    Progress,
    ProgressCallback,
    SampledSequence,
    SampleRequest,
    SampleResult,
    refuse_unsupported,
)
from tinkerscript.rollouts.call import pack_ids, pack_logprobs, unpack_ids
from tinkerscript.train.backends.base import SamplingClient


async def sample_from(
    client: SamplingClient,
    policy_version: int,
    request: SampleRequest,
    progress: ProgressCallback | None = None,
) -> SampleResult:
    """Sample from `client`, whose weights are those of `policy_version`.

    The embedded engine tells `progress` of tokens as they are sampled, and knows constraints and
    alternatives; Tinker's own client does not, and what it cannot do is refused.
    Raises AlignmentError for an answer with other many log probabilities than tokens.
    """
    params = tinker.SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=request.stop or request.stop_token_ids or None,
    )
    if isinstance(client, EmbeddedSamplingClient):
        sequences = await _sample_embedded(client, params, request, progress)
    else:
        sequences = await _sample_tinker(client, params, request)
    return SampleResult(
        sequences=sequences,
        policy_version=policy_version,
        logprob_kind="raw" if request.temperature == 0 else "processed",
        seed=request.seed,
    )


async def _sample_tinker(
    client: SamplingClient, params: tinker.SamplingParams, request: SampleRequest
) -> list[SampledSequence]:
    refuse_unsupported(request, "Tinker's sampling client", constraints=False, top_logprobs=False)
    prompt = tinker.ModelInput.from_ints(unpack_ids(request.prompt).tolist())
    try:
        response = await client.sample(prompt, request.num_samples, params)
    except tinker.TinkerError as error:
        raise EngineError(f"sampling failed: {error}") from error
    for sequence in response.sequences:
        check_lengths(sequence.tokens, sequence.logprobs)
    return [
        SampledSequence(
            sampled=pack_ids(sequence.tokens),
            logprobs=pack_logprobs(sequence.logprobs or []),
            stop_reason=sequence.stop_reason,
        )
        for sequence in response.sequences
    ]


async def _sample_embedded(
    client: EmbeddedSamplingClient,
    params: tinker.SamplingParams,
    request: SampleRequest,
    progress: ProgressCallback | None,
) -> list[SampledSequence]:
    relay = ProgressRelay(progress, asyncio.get_running_loop()) if progress is not None else None
    if request.constraint is not None:
        await _compile(client, request.constraint)
    rows = client.sample_rows(
        unpack_ids(request.prompt).tolist(),
        request.num_samples,
        params,
        stop_ids=request.stop_token_ids,
        report=relay.report if relay else None,
        top_logprobs=request.top_logprobs,
        grammar=request.constraint.grammar if request.constraint else None,
    )
    return [_packed(row) for row in await asyncio.wrap_future(rows)]


async def _compile(client: EmbeddedSamplingClient, constraint: Constraint) -> None:
    """Off the event loop: it may take a second the first time, and holds no lock of the interpreter."""
    try:
        await asyncio.to_thread(client.compile_grammar, constraint.grammar)
    except GrammarError as error:
        message = f"{constraint.asked_by} cannot be honoured by this engine: {error}"
        raise GatewayError(400, "unsupported_parameter", message, param=constraint.asked_by) from error


@dataclass(slots=True)
class _News:
    offset: int
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[Alternatives] = field(default_factory=list[Alternatives])


class ProgressRelay:
    """Carries the reports of one sample from the engine's thread to the event loop."""

    def __init__(self, tell: ProgressCallback, loop: asyncio.AbstractEventLoop) -> None:
        self._tell = tell
        self._loop = loop
        self._lock = threading.Lock()
        self._gathered: dict[int, _News] = {}
        """What each sequence sampled since the last delivery."""

    def report(self, index: int, offset: int, token: int, logprob: float, top: Alternatives) -> None:
        """Called on the engine's thread."""
        with self._lock:
            first = not self._gathered
            news = self._gathered.get(index)
            if news is None:
                news = self._gathered[index] = _News(offset)
            news.ids.append(token)
            news.logprobs.append(logprob)
            news.top.append(top)
        if first:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # The loop is closed: nobody awaits this sample any more.

    def _deliver(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, {}
        for index, news in gathered.items():
            top_ids, top_logprobs = _packed_top(news.top)
            self._tell(
                Progress(
                    index=index,
                    offset=news.offset,
                    sampled=pack_ids(news.ids),
                    logprobs=pack_logprobs(news.logprobs),
                    top_ids=top_ids,
                    top_logprobs=top_logprobs,
                )
            )


def check_lengths(tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
    """Raises AlignmentError unless there is one log probability for each token."""
    number = len(logprobs or ())
    if number != len(tokens):
        raise AlignmentError(
            f"lengths_differ: the sampler answered {len(tokens)} token ids and {number} log probabilities: "
            "one of them was cut short, or the ids were made from text",
            name="lengths_differ",
        )


def _packed(row: SampledRow) -> SampledSequence:
    check_lengths(row.ids, row.logprobs)
    top_ids, top_logprobs = _packed_top(row.top)
    return SampledSequence(
        sampled=pack_ids(row.ids),
        logprobs=pack_logprobs(row.logprobs),
        stop_reason="stop" if row.stop_reason == "stop" else "length",
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _packed_top(top: Sequence[Alternatives]) -> tuple[bytes, bytes]:
    pairs = [pair for alternatives in top for pair in alternatives]
    return pack_ids([token for token, _ in pairs]), pack_logprobs([logprob for _, logprob in pairs])
