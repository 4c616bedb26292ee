"""What stands between the training loop and an engine: seeds, and waiting for a service."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tinker

from run_ledger import KeptRows
from tinkerscript.errors import AlignmentError, GatewayError
from tinkerscript.ledger.rows import PublicationRow
from tinkerscript.rollouts.call import pack_ids, pack_logprobs
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.train.backends.backend import FrozenSampler, finish_despite_cancel
from tinkerscript.train.policy import Policy, SeededSampler
from trainer_fakes import ScriptedPublisher


class Recorder(Sampler):
    """Records requests; answers with `tokens` ids and `logprobs` log probabilities."""

    def __init__(self, tokens: int = 1, logprobs: int = 1) -> None:
        self.requests: list[SampleRequest] = []
        self.tokens, self.logprobs = tokens, logprobs

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.requests.append(request)
        sequence = SampledSequence(
            sampled=pack_ids([7] * self.tokens),
            logprobs=pack_logprobs([-1.0] * self.logprobs),
            stop_reason="stop",
        )
        return SampleResult(sequences=[sequence], policy_version=0, seed=request.seed)


async def asked(*prompts: list[int], seed: int = 1, step: int = 0, own: int | None = None) -> list[Any]:
    recorder = Recorder()
    sampler = SeededSampler(recorder, seed=seed, step=step, max_context=8)
    requests = [SampleRequest(prompt=pack_ids(ids), max_tokens=1, seed=own) for ids in prompts]
    seeds = [(await sampler.sample(request)).seed for request in requests]
    assert seeds == [request.seed for request in recorder.requests]
    return seeds


async def test_seeds_depend_on_what_is_asked_and_not_on_when() -> None:
    one, other = [5, 6], [7, 8]
    in_order = await asked(one, one, other)
    assert len(set(in_order)) == 3
    assert sorted(await asked(other, one, one)) == sorted(in_order)
    assert (await asked(one, one))[0] == in_order[0]


async def test_seeds_differ_between_runs_and_steps() -> None:
    found = [await asked([5], seed=seed, step=step) for seed in (1, 2) for step in (0, 1)]
    assert len({seeds[0] for seeds in found}) == 4


async def test_a_programs_own_seed_is_kept() -> None:
    assert await asked([5], [5], own=9) == [9, 9]


async def test_a_seed_that_was_used_before_is_passed_over() -> None:
    first, second, third = await asked([5], [5], [5])
    sampler = SeededSampler(Recorder(), seed=1, step=0, max_context=8, used={second})
    ids = np.array([5], np.int32)
    assert [sampler.seed_for(ids), sampler.seed_for(ids)] == [first, third]


async def test_a_request_is_cut_to_the_room_that_the_context_has() -> None:
    recorder = Recorder()
    sampler = SeededSampler(recorder, seed=1, step=0, max_context=8)
    await sampler.sample(SampleRequest(prompt=pack_ids([5] * 6), max_tokens=9))
    assert recorder.requests[0].max_tokens == 2
    with pytest.raises(GatewayError, match="the engine's context holds 8 tokens; the prompt has 8") as error:
        await sampler.sample(SampleRequest(prompt=pack_ids([5] * 8), max_tokens=9))
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")


async def test_a_misaligned_sampler_breaks_the_policy() -> None:
    request = SampleRequest(prompt=pack_ids([5]), max_tokens=3)
    ledger = KeptRows()
    backend = ScriptedPublisher(Recorder(tokens=3, logprobs=2))
    policy = Policy(backend, ledger)
    with pytest.raises(GatewayError, match="no weights have been published") as error:
        await policy.sample(request)
    assert error.value.status == 503
    assert [await policy.publish(), await policy.publish(4)] == backend.published == [0, 1]
    failing = asyncio.create_task(policy.failed())
    await asyncio.sleep(0)
    assert not failing.done()
    with pytest.raises(AlignmentError) as fault:
        await policy.sample(request)
    with pytest.raises(AlignmentError) as failed:
        await failing
    assert failed.value is fault.value
    assert [(row.policy_version, row.step) for row in ledger.of(PublicationRow)] == [(0, 0), (1, 4)]


class Asked(FrozenSampler):
    """Records what a backend is asked for."""

    async def _sequences(
        self, request: SampleRequest, params: tinker.SamplingParams, progress: ProgressCallback | None
    ) -> list[SampledSequence]:
        self.asked = request, params, progress
        return [SampledSequence(sampled=b"", logprobs=b"", stop_reason="stop")]


@pytest.mark.parametrize(
    ("options", "stop"),
    [
        ({}, None),
        ({"stop": ["END"], "stop_token_ids": [4]}, ["END"]),
        ({"stop_token_ids": [4], "extra_stop_ids": [5, 6]}, [4, 5, 6]),
    ],
)
async def test_a_backend_is_asked_with_tinkers_parameters(options: dict[str, Any], stop: Any) -> None:
    sampler = Asked(3)

    def progress(_: object) -> None:
        raise AssertionError("not used here")

    request = SampleRequest(
        prompt=pack_ids([1]), max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=11, **options
    )
    result = await sampler.sample(request, progress)
    params = tinker.SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=stop)
    assert sampler.asked == (request, params, progress)
    assert (result.policy_version, result.logprob_kind, result.seed) == (3, "processed", 11)
    assert len(result.sequences) == 1
    greedy = await sampler.sample(SampleRequest(prompt=pack_ids([1]), max_tokens=9, temperature=0.0))
    assert (greedy.logprob_kind, greedy.seed) == ("raw", None)


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_step_that_is_cancelled_gets_time_to_end_and_is_awaited(in_time: bool) -> None:
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> None:
        begun.set()
        try:
            await may_end.wait()
            ended.append("done")
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    step = asyncio.create_task(finish_despite_cancel(work(), within_s=20.0 if in_time else 0.01))
    await begun.wait()
    step.cancel()
    if in_time:
        await asyncio.sleep(0)
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert ended == (["done", "cleaned up"] if in_time else ["cleaned up"])
