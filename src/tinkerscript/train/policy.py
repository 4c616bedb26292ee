"""`SeededClient`: samples that depend on the run's seed and on what is asked, not on when it is asked.

The n-th request for a prompt to the weights of a step has a seed of its own, so that a run gives the same
tokens with any engine, any network and any number of workers, and after a restart, up to the rounding of log
probabilities.

`Policy`: the engine's newest published weights, and the policy version that names them.

Versions only grow, also over restarts: the highest one is on disk before it is used.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import tinker
from msgspec import structs

from tinkerscript.errors import AlignmentError, GatewayError
from tinkerscript.files import write_atomically
from tinkerscript.gateway.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.rollouts.call import IntArray, unpack_ids
from tinkerscript.train.backends.base import SamplingClient, TrainingClient
from tinkerscript.train.engine_sampler import sample_from
from tinkerscript.train.journal import EpisodeAccepted, Outcome


class SeededClient:
    """A sampling client, and the seeds of requests to it that have none. Belongs to one event loop."""

    def __init__(self, client: SamplingClient, *, seed: int, step: int, used: set[int] | None = None) -> None:
        """`step`: training steps behind the weights; `used`: seeds that are passed over."""
        self.client = client
        self.used = used if used is not None else set[int]()
        self._key = f"{seed}/{step}".encode()
        self._asked: Counter[bytes] = Counter()

    def seed_for(self, prompt: IntArray) -> int:
        """The seed of the next request for these ids (int32 [P]), in [0, 2^31)."""
        digest = hashlib.blake2b(self._key + prompt.tobytes(), digest_size=16).digest()
        while True:
            number = self._asked[digest]
            self._asked[digest] += 1
            mixed = hashlib.blake2b(digest + number.to_bytes(8, "big"), digest_size=4).digest()
            seed = int.from_bytes(mixed, "big") >> 1
            if seed not in self.used:
                return seed


class SeedRecordingClient:
    """What one episode samples with: `seeds` has one for each request, in order."""

    def __init__(self, client: SeededClient, fitted: Callable[[int, int], int]) -> None:
        """`fitted(prompt_tokens, max_tokens)`: how many may be sampled; raises what a prompt too long is."""
        self._client = client
        self._fitted = fitted
        self.seeds: list[int] = []

    async def sample_async(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> tinker.SampleResponse:
        if sampling_params.max_tokens is not None:
            fitted = self._fitted(prompt.length, sampling_params.max_tokens)
            sampling_params = sampling_params.model_copy(update={"max_tokens": fitted})
        if sampling_params.seed is None:
            seed = self._client.seed_for(np.asarray(prompt.to_ints(), np.int32))
            sampling_params = sampling_params.model_copy(update={"seed": seed})
        assert sampling_params.seed is not None
        self.seeds.append(sampling_params.seed)
        return await self._client.client.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)


class Policy:
    """What samples now. `publish` makes the training client's weights the next version.

    A sampler whose answers cannot be true is `broken`: `failed` raises, and the run ends.
    """

    def __init__(
        self,
        training_client: TrainingClient,
        version_file: Path,
        *,
        seed: int = 0,
        max_context: int | None = None,
    ) -> None:
        """`seed`: of what is sampled; `max_context`: tokens of prompt and response at most, None: unknown."""
        self._training_client = training_client
        self._version_file = version_file
        self._seed = seed
        self._max_context = max_context
        self._client: SeededClient | None = None
        self._used: set[int] = set()
        """Seeds that the next client to be published must not give."""

        self.version = int(version_file.read_text()) if version_file.exists() else -1
        self._broken = asyncio.Event()
        self._fault: AlignmentError | None = None

    async def publish(self, step: int = 0) -> int:
        """Freeze the current weights as the next policy version and sample from them from now on.

        `step`: training steps behind them, which with the run's seed decides what is sampled.
        """
        client = await self._training_client.save_weights_and_get_sampling_client()
        version = self.version + 1
        write_atomically(self._version_file, str(version), durable=True)
        used, self._used = self._used, set()
        self._client = SeededClient(client, seed=self._seed, step=step, used=used)
        self.version = version
        return version

    def note(self, outcome: Outcome) -> None:
        """What has been sampled is not sampled again.

        Matters to a run that goes on: results that the weights of this step gave before it was cut.
        """
        if isinstance(outcome, EpisodeAccepted):
            used = self._used if self._client is None else self._client.used
            used.update(call.seed for call in outcome.calls if call.seed is not None)

    @property
    def client(self) -> SeededClient:
        """The sampling client of the newest version. Raises GatewayError 503 before the first one."""
        if self._client is None:
            raise GatewayError(503, "engine_unavailable", "no weights have been published yet; retry")
        return self._client

    def noting(self) -> SeedRecordingClient:
        """What one episode samples with. Its method raises GatewayError as `fitted` does."""
        return SeedRecordingClient(self.client, self.fitted)

    def fitted(self, prompt_tokens: int, max_tokens: int) -> int:
        """Tokens that may be sampled after a prompt: `max_tokens`, or what room there is.

        Raises GatewayError 400 `context_length_exceeded` where there is none.
        """
        if self._max_context is None:
            return max_tokens
        if prompt_tokens >= self._max_context:
            raise GatewayError(
                400,
                "context_length_exceeded",
                f"the engine's context holds {self._max_context} tokens; the prompt has {prompt_tokens}",
                param="messages",
            )
        return min(max_tokens, self._max_context - prompt_tokens)

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Serve one request of the gateway from the newest version.

        Raises GatewayError for a prompt that the engine's context does not hold, and AlignmentError (see
        `failed`).
        """
        client, version = self.client, self.version
        prompt = unpack_ids(request.prompt)
        request = structs.replace(request, max_tokens=self.fitted(len(prompt), request.max_tokens))
        if request.seed is None:
            request = structs.replace(request, seed=client.seed_for(prompt))
        try:
            return await sample_from(client.client, version, request, progress)
        except AlignmentError as fault:
            self._fault = fault
            self._broken.set()
            raise

    async def failed(self) -> NoReturn:
        """Returns never. Raises the AlignmentError of a sample whose ids and logprobs are not one length."""
        await self._broken.wait()
        assert self._fault is not None
        raise self._fault
