"""The gateways that random programs call: one before a restart of the server, and one after it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI

from random_sampler import RandomSampler
from tinkerscript.config import SamplingConfig
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.endpoint import Gateway
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.sampled_model import SampledModel
from tinkerscript.rollouts.call import Call
from tinkerscript.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.testing import MemoryClaimBook


class HookedBook(MemoryClaimBook):
    """Calls `on_record` once, after a call has been recorded."""

    def __init__(self) -> None:
        super().__init__({})
        self.on_record: dict[OpenClaim, Callable[[], None]] = {}

    def register(self, key: str) -> OpenClaim:
        claim = OpenClaim(key, 1, 0)
        self._claims[key] = claim
        self.recorded[claim] = []
        return claim

    def drop(self, key: str) -> None:
        del self.recorded[self._claims.pop(key)]

    async def record(self, claim: OpenClaim, calls: Sequence[Call]) -> None:
        await super().record(claim, calls)
        if hook := self.on_record.pop(claim, None):
            hook()
        await asyncio.sleep(0)


class World:
    """Gateways over one book of claims; each of them stands for the server after a restart."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.book = HookedBook()
        self.rng = rng
        self.renderer = ChatRenderer(folder)
        self.gateways = [self._gateway() for _ in range(2)]
        self.apps = [FastAPI() for _ in self.gateways]
        for app, gateway in zip(self.apps, self.gateways, strict=True):
            app.include_router(gateway.router)
        self.sampler: RandomSampler

    def _gateway(self) -> Gateway:
        policy = SampledModel(
            "policy",
            claims=self.book,
            sampler=_Switch(self),
            renderer=self.renderer,
            sampling=SamplingConfig(temperature=1.0, max_tokens=64),
            accepted_names=["policy"],
        )
        return Gateway(policy, claims=self.book, model_names=["policy"], roles={})

    def new_sampler(self) -> RandomSampler:
        self.sampler = RandomSampler(self.renderer.tokenizer, self.rng)
        return self.sampler


class _Switch(Sampler):
    """The sampler of the program that is running."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        return await self._world.sampler.sample(request, progress)
