"""The shipped fakes keep what their seams promise."""

from __future__ import annotations

import pytest

from rollout_helpers import make_call
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.claim_book import OpenClaim
from tinkerscript.rollouts import pack_ids, unpack_ids, unpack_logprobs
from tinkerscript.sampler import Progress, SampleRequest
from tinkerscript.testing import MemoryClaimBook, ScriptedSampler


async def test_a_scripted_sampler_samples_what_its_script_returns() -> None:
    sampler = ScriptedSampler(lambda prompt: [*prompt, 9], policy_version=4)
    request = SampleRequest(prompt=pack_ids([1, 2]), max_tokens=2, num_samples=2, top_logprobs=2)
    result = await sampler.sample(request)
    assert sampler.requests == [request]
    assert (len(result.sequences), result.policy_version) == (2, 4)
    for sequence in result.sequences:
        assert unpack_ids(sequence.sampled).tolist() == [1, 2]
        assert unpack_logprobs(sequence.logprobs).tolist() == [-0.5, -0.5]
        assert unpack_ids(sequence.top_ids).tolist() == [1, 2, 2, 3]
        assert sequence.stop_reason == "length"
    longer = await sampler.sample(SampleRequest(prompt=pack_ids([1, 2]), max_tokens=8))
    assert unpack_ids(longer.sequences[0].sampled).tolist() == [1, 2, 9]
    assert longer.sequences[0].stop_reason == "stop"


async def test_a_scripted_samplers_progress_adds_up_to_its_result() -> None:
    reports: list[Progress] = []
    request = SampleRequest(prompt=pack_ids([5, 6, 7]), max_tokens=3, num_samples=2, top_logprobs=1)
    result = await ScriptedSampler(lambda prompt: prompt).sample(request, reports.append)
    assert [(report.index, report.offset) for report in reports] == [
        (index, offset) for offset in range(3) for index in range(2)
    ]
    for index, sequence in enumerate(result.sequences):
        mine = [report for report in reports if report.index == index]
        assert b"".join(report.sampled for report in mine) == sequence.sampled
        assert b"".join(report.logprobs for report in mine) == sequence.logprobs
        assert b"".join(report.top_ids for report in mine) == sequence.top_ids


async def test_a_claim_book_refuses_unknown_keys_and_lost_claims() -> None:
    claim = OpenClaim(episode_uuid="e", attempt=1, policy_version=0)
    book = MemoryClaimBook({"key": claim})
    call = make_call(None, [1], [2])
    assert await book.open("key") == claim
    await book.record(claim, [call])
    with pytest.raises(GatewayError) as unknown:
        await book.open("another key")
    assert (unknown.value.status, unknown.value.code) == (401, "invalid_api_key")
    book.lose(claim, "the lease expired")
    with pytest.raises(GatewayError, match="the lease expired") as lost:
        await book.open("key")
    assert (lost.value.status, lost.value.code) == (409, "claim_lost")
    with pytest.raises(GatewayError, match="the lease expired"):
        await book.record(claim, [call])
    assert book.recorded[claim] == [call]
