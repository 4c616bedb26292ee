"""A stream from the embedded engine, over a real link and a real server, to a client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from interchange_helpers import collect, new_episodes, run_config, trainer
from interchange_setup import FAST, running_server
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.train.backends.embedded_engine import EmbeddedSampler
from tinkerscript.trainer_link.messages import EpisodeAccepted

ASK: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What is 12+34?"}],
    "stream": True,
    "return_token_ids": True,
    "n": 3,
    "max_tokens": 40,
}


@pytest.mark.parametrize("stop", [[], ["Z"]])
async def test_tokens_arrive_while_the_engine_samples(tmp_path: Path, stop: list[str]) -> None:
    """The engine's answer is held until the client has seen content: only progress can have brought it."""
    seen = asyncio.Event()
    ended = asyncio.Event()
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path) as engine:
        sampler = EmbeddedSampler(await engine.create_sampling_client(), policy_version=7)

        async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
            result = await sampler.sample(request, progress)
            async with asyncio.timeout(30):
                await seen.wait()
            ended.set()
            return result

        async with (
            running_server(run_config(TINY_MODEL), tmp_path, environ={}, times=FAST) as (info, _),
            trainer(info.link_address, sample) as link,
            httpx.AsyncClient(base_url=info.url, timeout=30) as http,
        ):
            await link.resume([])
            await link.register(new_episodes("e"))
            claim = (
                await http.post("/claim_episode", json={"client_uuid": "c", "episode_type": "train"})
            ).json()
            headers = {"Authorization": f"Bearer {claim['openai_api_key']}"}
            ids: dict[int, list[int]] = {0: [], 1: [], 2: []}
            texts = {0: "", 1: "", 2: ""}
            body = ASK | {"temperature": 1, "stop": stop}
            async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as reply:
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        ids[choice["index"]] += choice.get("token_ids", [])
                        texts[choice["index"]] += choice["delta"].get("content", "")
                    if any(texts.values()) and not seen.is_set():
                        assert not ended.is_set()
                        seen.set()
            end = {"workflow_output": {"reward": 1.0}}
            assert (await http.post("/end_episode", json=end, headers=headers)).status_code == 200
            outcome = (await collect(link, 1))["e"]
    assert isinstance(outcome, EpisodeAccepted)
    assert [call.sampled for call in outcome.calls] == [pack_ids(ids[index]) for index in range(3)]
    assert [json.loads(call.reply)["content"] for call in outcome.calls] == list(texts.values())
