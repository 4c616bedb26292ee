"""`Policy`: the engine's newest published weights, and the policy version that names them.

Versions only grow, also over restarts: the highest one is on disk before it is used.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

from msgspec import structs

from tinkerscript.engine.clients import TrainingClient
from tinkerscript.errors import AlignmentError, GatewayError
from tinkerscript.files import write_atomically
from tinkerscript.gateway.sampler import SampleRequest, SampleResult, Tell
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.train.engine_sampler import sample_from
from tinkerscript.train.journal import EpisodeAccepted, Outcome
from tinkerscript.train.seeded import NotingClient, SeededClient


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

    def noting(self) -> NotingClient:
        """What one episode samples with. Its method raises GatewayError as `fitted` does."""
        return NotingClient(self.client, self.fitted)

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

    async def sample(self, request: SampleRequest, progress: Tell | None = None) -> SampleResult:
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
