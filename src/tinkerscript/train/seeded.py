"""`SeededClient`: samples that depend on the run's seed and on what is asked, not on when it is asked.

The n-th request for a prompt to the weights of a step has a seed of its own, so that a run gives the same
tokens with any engine, any network and any number of workers, and after a restart, up to the rounding of log
probabilities.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable

import numpy as np
import tinker

from tinkerscript.engine.clients import SamplingClient
from tinkerscript.rollouts.call import IntArray


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


class NotingClient:
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
