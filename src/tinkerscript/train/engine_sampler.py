"""One request of the gateway as a call of an engine's sampling client.

Invariant: progress reaches the event loop that awaits the sample, in the order of the tokens; while the loop
is busy reports gather, and they are told in one go.
"""

from __future__ import annotations

import asyncio
import threading

import tinker

from tinkerscript.engine.clients import SamplingClient
from tinkerscript.engine.embedded import EmbeddedSamplingClient
from tinkerscript.gateway.sampler import Progress, SampledSequence, SampleRequest, SampleResult, Tell
from tinkerscript.rollouts.call import pack_ids, pack_logprobs, unpack_ids


async def sample_from(
    client: SamplingClient, policy_version: int, request: SampleRequest, progress: Tell | None = None
) -> SampleResult:
    """Sample from `client`, whose weights are those of `policy_version`.

    The embedded engine tells `progress` of tokens as they are sampled; Tinker's own client tells nothing.
    """
    params = tinker.SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=request.stop or request.stop_token_ids or None,
    )
    prompt = tinker.ModelInput.from_ints(unpack_ids(request.prompt).tolist())
    if progress is not None and isinstance(client, EmbeddedSamplingClient):
        relay = ProgressRelay(progress, asyncio.get_running_loop())
        response = await client.sample(prompt, request.num_samples, params, report=relay.report)
    else:
        response = await client.sample(prompt, request.num_samples, params)
    return SampleResult(
        sequences=[_packed(sequence) for sequence in response.sequences],
        policy_version=policy_version,
        logprob_kind="raw" if request.temperature == 0 else "processed",
    )


class ProgressRelay:
    """Carries the reports of one sample from the engine's thread to the event loop."""

    def __init__(self, tell: Tell, loop: asyncio.AbstractEventLoop) -> None:
        self._tell = tell
        self._loop = loop
        self._lock = threading.Lock()
        self._gathered: dict[int, tuple[int, list[int], list[float]]] = {}
        """Offset, ids and logprobs of each sequence since the last delivery."""

    def report(self, index: int, offset: int, token: int, logprob: float) -> None:
        """Called on the engine's thread."""
        with self._lock:
            first = not self._gathered
            _, ids, logprobs = self._gathered.setdefault(index, (offset, [], []))
            ids.append(token)
            logprobs.append(logprob)
        if first:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # The loop is closed: nobody awaits this sample any more.

    def _deliver(self) -> None:
        with self._lock:
            gathered, self._gathered = self._gathered, {}
        for index, (offset, ids, logprobs) in gathered.items():
            self._tell(
                Progress(index=index, offset=offset, sampled=pack_ids(ids), logprobs=pack_logprobs(logprobs))
            )


def _packed(sequence: tinker.types.SampledSequence) -> SampledSequence:
    return SampledSequence(
        sampled=pack_ids(sequence.tokens),
        logprobs=pack_logprobs(sequence.logprobs or []),
        stop_reason=sequence.stop_reason,
    )
