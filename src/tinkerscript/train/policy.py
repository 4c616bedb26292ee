"""`Policy`: the engine's newest published weights, and the policy version that names them.

Versions only grow, also over restarts: the highest one is on disk before it is used.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NoReturn

from tinker import APIFuture

from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.engine.training_client import EmbeddedTrainingClient
from tinkerscript.errors import AlignmentError, GatewayError
from tinkerscript.gateway.sampler import SampleRequest, SampleResult, Tell
from tinkerscript.train.engine_sampler import sample_from


class Policy:
    """What samples now. `publish` makes the training client's weights the next version.

    A sampler whose answers cannot be true is `broken`: `failed` raises, and the run ends.
    """

    def __init__(self, training_client: EmbeddedTrainingClient, version_file: Path) -> None:
        self._training_client = training_client
        self._version_file = version_file
        self._client: EmbeddedSamplingClient | None = None
        self.version = int(version_file.read_text()) if version_file.exists() else -1
        self._broken = asyncio.Event()
        self._fault: AlignmentError | None = None

    async def publish(self) -> int:
        """Freeze the current weights as the next policy version and sample from them from now on."""
        future: APIFuture[EmbeddedSamplingClient] = (
            self._training_client.save_weights_and_get_sampling_client()
        )
        client = await future
        version = self.version + 1
        _write_durably(self._version_file, str(version))
        self._client, self.version = client, version
        return version

    @property
    def client(self) -> EmbeddedSamplingClient:
        """The sampling client of the newest version. Raises GatewayError 503 before the first one."""
        if self._client is None:
            raise GatewayError(503, "engine_unavailable", "no weights have been published yet; retry")
        return self._client

    async def sample(self, request: SampleRequest, progress: Tell | None = None) -> SampleResult:
        """Serve one request of the gateway from the newest version. Raises AlignmentError (see `failed`)."""
        try:
            return await sample_from(self.client, self.version, request, progress)
        except AlignmentError as fault:
            self._fault = fault
            self._broken.set()
            raise

    async def failed(self) -> NoReturn:
        """Returns never. Raises the AlignmentError of a sample whose ids and logprobs are not one length."""
        await self._broken.wait()
        assert self._fault is not None
        raise self._fault


def _write_durably(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
