"""A trainer's sampler whose answers can be held back."""

from __future__ import annotations

import asyncio

from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.testing import ScriptedSampler


class GatedSampler(ScriptedSampler):
    """Samples while `go` is set, as it is at first; `waiting` counts the samples that are held back."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: [72, 105, prompt[-1]], policy_version=4)
        self.go = asyncio.Event()
        self.go.set()
        self.waiting = 0

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.waiting += 1
        try:
            await self.go.wait()
        finally:
            self.waiting -= 1
        return await super().sample(request, progress)
