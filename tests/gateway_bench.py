"""A gateway over a scripted sampler, and an HTTP client that holds one claim's key."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from tinkerscript.config import SamplingConfig
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.endpoint import Gateway, create_gateway
from tinkerscript.gateway.outside_server import OutsideServer
from tinkerscript.rollouts.call import Call, full_prompts
from tinkerscript.sampler import (
    ProgressCallback,
    Sampler,
    SampleRequest,
    SampleResult,
    refuse_unsupported,
)
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler
from tinkerscript.tokenizer import LightTokenizer
from tiny_tokenizer import MARKERS

CLAIM = OpenClaim("episode", 1, 0)
SAMPLING = SamplingConfig(temperature=0.5, max_tokens=20)


class Bench:
    """A gateway over a scripted sampler, and an HTTP client that holds one claim's key."""

    def __init__(
        self,
        folder: Path,
        claims: MemoryClaimBook | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        outside: dict[str, OutsideServer] | None = None,
        no_images: dict[str, str] | None = None,
    ) -> None:
        self._outside = outside
        self._no_images = no_images
        self.folder = folder
        self._chat_template_kwargs = chat_template_kwargs
        self.tokenizer = LightTokenizer(folder)
        self.answer: str | Callable[[list[int]], str] = "hello"
        self.sampler = ScriptedSampler(self._script, policy_version=3)
        self.claims = claims or MemoryClaimBook({"key": CLAIM})
        self.use(self.sampler)

    def use(self, sampler: Sampler) -> None:
        self.gateway: Gateway = create_gateway(
            claims=self.claims,
            sampler=sampler,
            model_folder=self.folder,
            model_name="tiny",
            sampling=SAMPLING,
            chat_template_kwargs=self._chat_template_kwargs,
            outside=self._outside,
            no_images=self._no_images,
        )
        self.app = FastAPI()
        self.app.include_router(self.gateway.router)
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://test", headers={"Authorization": "Bearer key"}
        )

    def _script(self, prompt: list[int]) -> list[int]:
        text = self.answer(prompt) if callable(self.answer) else self.answer
        pieces = re.split(r"(</?\w+>)", text)
        units = [unit for piece in pieces for unit in ([piece] if piece in MARKERS else piece)]
        ids = [token for unit in units for token in self.tokenizer.encode(unit)]
        return ids + self.tokenizer.encode("<|im_end|>")

    @property
    def calls(self) -> list[Call]:
        """What is recorded of the claim."""
        return self.claims.recorded[CLAIM]

    def check_one_sequence(self, turns: int) -> None:
        """Each call extends the one before, and the sampler got the recorded prompts."""
        calls, prompts = self.calls, full_prompts(self.calls)
        assert [call.parent_id for call in calls] == [None, *(call.call_id for call in calls[:-1])]
        assert len(calls) == turns
        asked = [request.prompt for request in self.sampler.requests]
        assert [prompts[call.call_id] for call in calls] == asked

    async def post(self, messages: list[dict[str, Any]] | str = "hi", **fields: Any) -> httpx.Response:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"model": "policy", "messages": messages} | fields
        return await self.client.post("/v1/chat/completions", json=body)

    async def ask(self, messages: list[dict[str, Any]] | str = "hi", **fields: Any) -> dict[str, Any]:
        response = await self.post(messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()


class LimitedSampler(ScriptedSampler):
    """An engine without constraints and top logprobs."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: [])

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        refuse_unsupported(request, "this engine", constraints=False, top_logprobs=False)
        return await super().sample(request, progress)


class WaitingSampler(Sampler):
    """Samples until it is cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.started.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()
