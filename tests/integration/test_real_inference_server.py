"""The same seam over a real server of vLLM; `TINKERSCRIPT_TEST_VLLM` holds its URL.

The server must serve the folder that `TINKERSCRIPT_TEST_MODEL` names (default: the tiny model that ships), in
float32 if log probabilities are to equal the embedded engine's. docs/samplers.md has the commands.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkerscript.config import InferenceConfig
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.samplers import RemoteSampler, remote_sampler
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids, unpack_ids, unpack_logprobs
from tinkerscript.sampler import SampleRequest

URL = os.environ.get("TINKERSCRIPT_TEST_VLLM", "")
MODEL = Path(os.environ.get("TINKERSCRIPT_TEST_MODEL", str(TINY_MODEL)))
MAX_GAP = 1e-3
"""Nats between two implementations in float32."""

pytestmark = pytest.mark.skipif(not URL, reason="no TINKERSCRIPT_TEST_VLLM")


@pytest.fixture
async def sampler() -> AsyncGenerator[RemoteSampler]:
    config = InferenceConfig.model_validate({"backend": "vllm", "base_url": URL})
    async with remote_sampler(config, model_folder=MODEL, environ={}, timeout_s=60) as made:
        yield made


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(MODEL)


def request(renderer: ChatRenderer, **more: Any) -> SampleRequest:
    prompt = renderer.render([{"role": "user", "content": "Say something."}], [])
    options = {"max_tokens": 32, "stop_token_ids": renderer.stop_token_ids} | more
    return SampleRequest(prompt=pack_ids(prompt), **options)


async def test_stop_tokens_and_stop_strings_are_among_the_ids(
    sampler: RemoteSampler, renderer: ChatRenderer
) -> None:
    greedy = (await sampler.sample(request(renderer, temperature=0.0))).sequences[0]
    ids = unpack_ids(greedy.sampled).tolist()
    if greedy.stop_reason == "stop":
        assert ids[-1] in renderer.stop_token_ids
    text = renderer.tokenizer.decode(ids[:1])
    cut = (await sampler.sample(request(renderer, temperature=0.0, stop=[text]))).sequences[0]
    assert (unpack_ids(cut.sampled).tolist(), cut.stop_reason) == (ids[:1], "stop")


async def test_a_prompt_that_does_not_fit_is_the_dialects_error(sampler: RemoteSampler) -> None:
    room = sampler.facts.max_context
    prompt = pack_ids([5] * (room - 1))
    assert len((await sampler.sample(SampleRequest(prompt=prompt, max_tokens=9))).sequences[0].sampled) == 4
    with pytest.raises(GatewayError) as caught:
        await sampler.sample(SampleRequest(prompt=pack_ids([5] * room), max_tokens=9))
    assert caught.value.code == "context_length_exceeded"


async def test_logprobs_equal_the_embedded_engines(sampler: RemoteSampler, renderer: ChatRenderer) -> None:
    engine_module = pytest.importorskip("tinkerscript.engine.embedded")
    tinker = pytest.importorskip("tinker")
    sample = request(renderer, num_samples=16)
    result = await sampler.sample(sample)
    prompt = unpack_ids(sample.prompt).tolist()
    gaps: list[float] = []
    with engine_module.EmbeddedEngine(MODEL, checkpoint_dir=MODEL.parent) as engine:
        client = await engine.create_sampling_client()
        for sequence in result.sequences:
            whole = prompt + unpack_ids(sequence.sampled).tolist()
            ours = await client.compute_logprobs(tinker.ModelInput.from_ints(whole))
            gaps += np.abs(np.array(ours[len(prompt) :]) - unpack_logprobs(sequence.logprobs)).tolist()
    print(f"{len(gaps)} tokens: mean |dlogp| {np.mean(gaps):.2e}, max {max(gaps):.2e}")
    assert max(gaps) <= MAX_GAP
