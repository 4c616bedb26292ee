"""The `openai` package, unchanged but for base URL and key, against the gateway under uvicorn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI
from openai import OpenAI

from serving import serving
from tinkerscript.config import SamplingConfig
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.gateway.endpoint import create_gateway
from tinkerscript.rollouts.call import full_prompts
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler
from tinkerscript.tokenizer import LightTokenizer

CLAIMS = {f"key{n}": OpenClaim(f"episode{n}", 1, 0) for n in range(4)}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class HoldableSampler(ScriptedSampler):
    """A scripted sampler that can be made to wait, and records when a sample is cancelled."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.hold = False
        self.waiting = threading.Event()
        self.cancelled = threading.Event()

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        if self.hold:
            self.waiting.set()
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.cancelled.set()
        return await super().sample(request, progress)


class Served:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = LightTokenizer(folder)
        self.claims = MemoryClaimBook(dict(CLAIMS))
        self.answers = {"add": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'}
        self.sampler = HoldableSampler(self._script)
        self.gateway = create_gateway(
            claims=self.claims,
            sampler=self.sampler,
            model_folder=folder,
            model_name="tiny",
            sampling=SamplingConfig(max_tokens=200),
        )
        self.app = FastAPI()
        self.app.include_router(self.gateway.router)
        self.url = ""

    def _script(self, prompt: list[int]) -> list[int]:
        """Echo the last user message one byte a token, unless it asks for a tool."""
        text = self.tokenizer.decode(prompt)
        asked = text.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]
        if asked in self.answers:
            return self.tokenizer.encode(self.answers[asked] + "<|im_end|>")
        return [i for char in asked for i in self.tokenizer.encode(char)] + self.tokenizer.encode(
            "<|im_end|>"
        )

    def connection(self, key: str = "key0") -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": key, "max_retries": 2}


@pytest.fixture
def served(byte_model: Path) -> Iterator[Served]:
    served = Served(byte_model)
    with serving(served.app) as served.url:
        yield served


def check_one_sequence(served: Served, claim: OpenClaim, turns: int) -> None:
    """All calls of the claim form one chain whose prompts are what the sampler was given."""
    calls = served.claims.recorded[claim]
    prompts = full_prompts(calls)
    assert len(calls) == turns
    assert [call.parent_id for call in calls] == [None, *(call.call_id for call in calls[:-1])]
    asked = {request.prompt for request in served.sampler.requests}
    assert {prompts[call.call_id] for call in calls} <= asked


def test_a_multi_turn_tool_loop_with_the_sync_client(served: Served) -> None:
    with OpenAI(**served.connection()) as client:
        messages: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": "add"}]
        first = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        assert first.choices[0].finish_reason == "tool_calls"
        assert first.choices[0].message.tool_calls
        messages.append(first.choices[0].message)
        for call in first.choices[0].message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        second = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        messages += [second.choices[0].message.model_dump(), {"role": "user", "content": "hello"}]
        third = client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=[TOOL],
            temperature=1,
            extra_body={"return_token_ids": True},
        )
        assert third.choices[0].message.content == "hello"
        assert third.usage is not None
        assert third.usage.completion_tokens == 6
        assert len(third.choices[0].model_extra["token_ids"]) == 6  # type: ignore[index]
        assert [model.id for model in client.models.list()][:2] == ["tiny", "policy"]
    check_one_sequence(served, CLAIMS["key0"], 3)


def test_a_caller_that_hangs_up_cancels_its_sample(served: Served) -> None:
    served.sampler.hold = True
    with OpenAI(**(served.connection() | {"max_retries": 0, "timeout": 0.3})) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
        assert served.sampler.cancelled.wait(timeout=10)
    assert served.claims.recorded[CLAIMS["key0"]] == []
