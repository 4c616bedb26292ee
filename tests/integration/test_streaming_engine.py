"""A stream from the embedded engine, over a real link and a real server, to a client."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import tinker
from msgspec import structs
from openai import AsyncOpenAI

from interchange_helpers import collect, new_episodes, run_config, scripted, trainer
from interchange_setup import FAST, Setup, running_server
from run_ledger import KeptRows
from small_models import sft_datum
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.sampler import ProgressCallback, SampleRequest, SampleResult
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.policy import Policy
from tinkerscript.trainer_link.messages import EpisodeAccepted


async def test_new_weights_go_on_with_a_streamed_call(tmp_path: Path) -> None:
    """The client sees no gap, and the record says which weights sampled which token.

    Weights are published when the client has seen some tokens: only progress can have brought them.
    """
    with EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path) as engine:
        backend = EmbeddedBackend(engine)
        policy = Policy(backend, KeptRows(), in_flight=True)
        versions: list[EmbeddedSamplingClient] = []

        async def publish() -> None:
            if versions:
                await backend.client.forward_backward([sft_datum(range(40, 64))], "cross_entropy")
                await backend.client.optim_step(tinker.AdamParams(learning_rate=0.002))
            await policy.publish(len(versions))
            versions.append(await engine.create_sampling_client())

        async def sample(request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
            endless = structs.replace(request, stop_token_ids=[engine.vocabulary])
            return await policy.sample(endless, progress)

        await publish()
        # In a crowd a token takes so long that the client, and what it sets off, is never far behind.
        parameters = tinker.SamplingParams(max_tokens=1900, stop=[engine.vocabulary])
        crowd = versions[0].sample(tinker.ModelInput.from_ints([5]), 32, parameters)
        config = run_config(TINY_MODEL)
        ids, text = list[int](), ""
        async with (
            running_server(config, tmp_path, environ={}, times=FAST) as (info, _),
            trainer(info.link_address, sample) as link,
            httpx.AsyncClient(base_url=info.url, timeout=30) as http,
        ):
            await link.resume([])
            await link.register(new_episodes("e"))
            setup = Setup(http, link, info.url, tmp_path, scripted())
            claim = await setup.claim()
            async with AsyncOpenAI(base_url=claim.openai_base_url, api_key=claim.openai_api_key) as client:
                stream = await client.chat.completions.create(
                    model="policy",
                    messages=[{"role": "user", "content": "What is 12+34?"}],
                    stream=True,
                    max_tokens=200,
                    temperature=1,
                    extra_body={"return_token_ids": True},
                )
                async for chunk in stream:
                    for choice in chunk.choices:
                        ids += (choice.model_extra or {}).get("token_ids", [])
                        text += choice.delta.content or ""
                    if len(versions) < 4 and len(ids) >= 40 * len(versions):
                        await publish()
            await setup.end(claim)
            outcome = (await collect(link, 1))["e"]
        versions[0].cut()
        await crowd
        assert isinstance(outcome, EpisodeAccepted)
        (call,) = outcome.calls
        assert call.sampled_ids.tolist() == ids
        assert len(ids) == 200
        assert json.loads(call.reply)["content"] == text
        assert [version for version, _ in call.spans] == [0, 1, 2, 3]
        assert (call.policy_version, call.policy_version_end) == (0, 3)
        assert outcome.policy_versions == {0, 1, 2, 3}
        (rollout,) = merge_calls(outcome.calls, episode_uuid="e")
        for version, span in rollout.segments[0].versions:
            tokens = tinker.ModelInput.from_ints(rollout.tokens.tolist())
            wanted = (await versions[version].compute_logprobs(tokens))[span]
            assert rollout.logprobs[span] == pytest.approx(wanted, abs=1e-4)
