"""vLLM behind the `Sampler` seam, over HTTP, on a fake of it: probe, calls, failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fake_vllm import FakeVllm
from inference_fakes import CONTEXT, Distribution, Faults
from interchange_helpers import until
from serving import serving
from tinkerscript.config import InferenceConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.samplers import RemoteSampler, remote_sampler
from tinkerscript.gateway.samplers.inference_server import Upstream
from tinkerscript.gateway.samplers.remote import TOKENIZER_TEXT
from tinkerscript.gateway.samplers.vllm import VllmServer
from tinkerscript.rollouts.call import pack_ids, unpack_ids, unpack_logprobs
from tinkerscript.sampler import SampledSequence, SampleRequest
from tinkerscript.tokenizer import LightTokenizer

PROMPT = [5, 6, 7, 8]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def distribution(byte_model: Path) -> Distribution:
    tokenizer = LightTokenizer(byte_model)
    assert tokenizer.eos_token_id is not None
    return Distribution(tokenizer.vocab_size, tokenizer.eos_token_id)


@asynccontextmanager
async def opened(
    fake: FakeVllm, folder: Path, *, timeout_s: float = 20.0, suffix: str = "/v1", **config: Any
) -> AsyncGenerator[RemoteSampler]:
    """A sampler over `fake`, probed; the fake's log starts after the probe."""
    with serving(fake.app) as url:
        options = {"backend": "vllm", "base_url": url + suffix, "start_timeout_s": 5} | config
        section = InferenceConfig.model_validate(options)
        environ = {"SERVER_KEY": "secret"}
        async with remote_sampler(
            section, model_folder=folder, environ=environ, timeout_s=timeout_s
        ) as sampler:
            fake.log.clear()
            fake.requests.clear()
            yield sampler


def request(prompt: list[int] | None = None, **more: Any) -> SampleRequest:
    return SampleRequest(prompt=pack_ids(PROMPT if prompt is None else prompt), **({"max_tokens": 24} | more))


def ids(sequence: SampledSequence) -> list[int]:
    return unpack_ids(sequence.sampled).tolist()


# The probe


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({}, {"logprob_kind": "raw", "rescored": True}),
        ({"logprobs": "processed"}, {"logprob_kind": "processed", "rescored": True}),
        ({"scores": False}, {"rescored": False, "logprob_kind": "raw"}),
    ],
)
async def test_the_probe_pins_what_it_saw(
    faults: dict[str, Any], expected: dict[str, Any], distribution: Distribution, byte_model: Path
) -> None:
    async with opened(FakeVllm(distribution, Faults(**faults)), byte_model) as sampler:
        facts = msgspec.structs.asdict(sampler.facts)
    assert {name: facts[name] for name in expected} == expected
    assert facts["model"] == "served"
    assert facts["max_context"] == CONTEXT


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"token_ids": False}, r"use vLLM 0\.10\.2 or newer"),
        ({"id_strings": False}, "top_logprobs has no ids"),
        ({"cut_stop_token": True}, r"the stop token \d+ is not among the ids|it sampled nothing"),
        ({"rank_one": True}, "have other logprobs than the same tokens in a prompt"),
        ({"shifted": True}, r"have other logprobs than the same tokens in a prompt, by \d.*one token late"),
        ({"logprobs": "logits"}, "these are logits"),
        ({"extra_prompt": True}, "sampled after another prompt|counts .* prompt tokens where"),
        ({"not_finite": True}, r"other logprobs than|by inf nats"),
        ({"key": "secret"}, "refused our key .* inference.api_key_env"),
        ({"status": 500}, "out of luck"),
    ],
)
async def test_a_server_that_cannot_be_recorded_is_refused(
    faults: dict[str, Any], message: str, distribution: Distribution, byte_model: Path
) -> None:
    opening = opened(FakeVllm(distribution, Faults(**faults)), byte_model)
    with pytest.raises(ConfigError, match=message) as caught:
        await opening.__aenter__()
    assert "the vLLM server at http://127.0.0.1:" in str(caught.value)


async def test_the_tokenizers_are_compared(distribution: Distribution, byte_model: Path) -> None:
    own = LightTokenizer(byte_model).encode(TOKENIZER_TEXT)
    same, other = Faults(tokenizer={TOKENIZER_TEXT: own}), Faults(tokenizer={TOKENIZER_TEXT: own[1:]})
    async with opened(FakeVllm(distribution, same), byte_model) as sampler:
        assert sampler.facts.rescored
    with pytest.raises(ConfigError, match=r"its tokenizer gives .* point engine\.model at the folder"):
        async with opened(FakeVllm(distribution, other), byte_model):
            pass


async def test_what_the_config_names_must_be_there(distribution: Distribution, byte_model: Path) -> None:
    with serving(FakeVllm(distribution, Faults()).app) as url:
        for options, message in (
            ({"base_url": url, "model": "another"}, r"inference\.model: .* serves 'served', not 'another'"),
            ({"base_url": url, "api_key_env": "NO_SUCH_KEY"}, r"api_key_env: .* NO_SUCH_KEY is not set"),
            ({"base_url": "http://127.0.0.1:9"}, r"answer within inference\.start_timeout_s \(0 s\)"),
            ({}, r"inference\.backend: vllm needs inference\.base_url"),
        ):
            section = InferenceConfig.model_validate({"backend": "vllm", "start_timeout_s": 0} | options)
            opening = remote_sampler(section, model_folder=byte_model, environ={}, timeout_s=5)
            with pytest.raises(ConfigError, match=message):
                await opening.__aenter__()


# Calls


async def test_a_result_is_what_the_server_sampled(distribution: Distribution, byte_model: Path) -> None:
    fake = FakeVllm(distribution, Faults())
    async with opened(fake, byte_model) as sampler:
        result = await sampler.sample(request(num_samples=3, stop_token_ids=[distribution.end]))
    assert [ids(sequence) for sequence in result.sequences] == [entry.ids for entry in fake.log]
    for sequence, entry in zip(result.sequences, fake.log, strict=True):
        assert entry.prompt == PROMPT
        assert np.abs(unpack_logprobs(sequence.logprobs) - entry.raw).max() < TOLERANCE
        assert sequence.stop_reason == ("stop" if entry.ids[-1] == distribution.end else "length")
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("logprobs", "more", "recorded"),
    [
        ("raw", {"top_k": 2}, "raw"),
        ("raw", {"min_p": 0.1}, "raw"),
        ("raw", {"repetition_penalty": 1.2}, "unknown"),
        ("raw", {"extra_stop_ids": [5]}, "raw"),
        ("processed", {}, "processed"),
        ("processed", {"top_k": 2}, "unknown"),
        ("processed", {"min_p": 0.1}, "unknown"),
    ],
)
async def test_what_changes_the_distribution_is_passed_on_and_the_kind_of_logprobs_stays_true(
    logprobs: str,
    more: dict[str, Any],
    recorded: str,
    distribution: Distribution,
    byte_model: Path,
) -> None:
    fake = FakeVllm(distribution, Faults(logprobs=logprobs, key="secret"))
    async with opened(fake, byte_model, api_key_env="SERVER_KEY", suffix="/") as sampler:
        made = request(stop=["x"], stop_token_ids=[distribution.end], **more)
        assert (await sampler.sample(made)).logprob_kind == recorded
    sent = fake.requests[-1]
    assert sent["top_k"] == made.top_k
    assert sent["min_p"] == made.min_p
    assert sent["repetition_penalty"] == made.repetition_penalty
    assert sent["stop_token_ids"] == [distribution.end, *made.extra_stop_ids]


async def test_a_stop_string_is_found_that_other_weights_have_begun(byte_model: Path) -> None:
    """The server looks for those that begin in what it samples itself."""
    tokenizer = LightTokenizer(byte_model)
    letters = tuple(tokenizer.encode("abcdefghijklmnop"))
    fake = FakeVllm(Distribution(tokenizer.vocab_size, letters[0], words=letters), Faults())
    async with opened(fake, byte_model) as sampler:
        flying = RemoteSampler(sampler.server, sampler.facts, text=tokenizer.decode)
        greedy = {"temperature": 0.0, "stop_token_ids": [0]}
        (whole,) = (await flying.sample(request(**greedy))).sequences
        known = ids(whole)
        text = tokenizer.decode(known[:5])
        assert text.index(text[2:]) == 2
        rest = request([*PROMPT, *known[:3]], sampled=3, top_logprobs=2, stop=[text[2:]], **greedy)
        (found,) = (await flying.sample(rest)).sequences
        assert (ids(found), found.stop_reason, found.is_cut) == (known[3:5], "stop", False)
        assert (len(found.logprobs), len(found.top_ids)) == (8, 16)
        flying.cut()
        (nothing,) = (await flying.sample(rest)).sequences
        assert (nothing.sampled, nothing.is_cut) == (b"", True)


async def test_a_stream_that_ends_too_soon_or_has_impossible_numbers_is_no_reply(
    distribution: Distribution, byte_model: Path
) -> None:
    fake = FakeVllm(distribution, Faults())
    async with opened(fake, byte_model) as sampler:
        flying = RemoteSampler(sampler.server, sampler.facts, text=str)
        fake.faults.abort = True
        with pytest.raises(GatewayError, match="aborted the call; retry"):
            await flying.sample(request())
        for code, status, message in (
            (0, 503, "ended a stream before its samples were complete; retry"),
            (500, 503, "answered 500: the engine died; retry"),
            (400, 400, "refused the request: the engine died"),
        ):
            fake.ends_early = code
            with pytest.raises(GatewayError, match=message) as error:
                await flying.sample(request())
            assert error.value.status == status, "a replica that refuses a request is not lost"
        fake.ends_early = None
        for faults, message in (
            (Faults(last_id=2**31), "2147483648 is no token id"),
            (Faults(last_id=-5), "-5 is no token id"),
            (Faults(choice=99), "choice 99 of a request for 1"),
            (Faults(choice=-1), "choice -1 of a request for 1"),
        ):
            fake.faults = faults
            with pytest.raises(GatewayError, match=f"inference server's reply cannot be used: {message}"):
                await flying.sample(request())


async def test_replies_never_grow_beyond_the_context(distribution: Distribution, byte_model: Path) -> None:
    fake = FakeVllm(distribution, Faults())
    async with opened(fake, byte_model) as sampler:
        room = 3
        prompt = [5] * (sampler.facts.max_context - room)
        result = await sampler.sample(request(prompt, max_tokens=100))
        assert len(ids(result.sequences[0])) <= room
        with pytest.raises(GatewayError) as caught:
            await sampler.sample(request([5] * sampler.facts.max_context))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


# Failures


@pytest.mark.parametrize(
    ("faults", "status", "code", "message"),
    [
        ({"status": 500}, 503, "engine_unavailable", "answered 500: out of luck"),
        ({"status": 429}, 503, "engine_unavailable", "answered 429"),
        ({"status": 504}, 504, "engine_timeout", "timed out"),
        ({"status": 400}, 400, "invalid_request", "refused the request: out of luck"),
        ({"status": 401}, 502, "engine_error", "refused our key"),
        ({"abort": True}, 503, "engine_unavailable", "aborted the call"),
        ({"extra_prompt": True}, 502, "engine_error", "prompt"),
        ({"token_ids": False}, 502, "engine_error", "token_ids"),
        ({"last_id": 2**63}, 502, "engine_error", "9223372036854775808 is no token id"),
    ],
)
async def test_failures_have_the_status_for_the_callers_retries(
    faults: dict[str, Any],
    status: int,
    code: str,
    message: str,
    distribution: Distribution,
    byte_model: Path,
) -> None:
    fake = FakeVllm(distribution, Faults())
    async with opened(fake, byte_model) as sampler:
        fake.faults = Faults(**faults)
        with pytest.raises(GatewayError, match=message) as caught:
            await sampler.sample(request())
        assert (caught.value.status, caught.value.code) == (status, code)
        assert len(fake.requests) == 1, "a sampled call is not repeated in silence"


async def test_a_call_that_is_given_up_or_takes_too_long_closes_its_connection(
    distribution: Distribution, byte_model: Path
) -> None:
    fake = FakeVllm(distribution, Faults())
    async with opened(fake, byte_model, timeout_s=1.0) as sampler:
        fake.faults = Faults(hang=True)
        call = asyncio.create_task(sampler.sample(request()))
        await until(lambda: len(fake.requests) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(GatewayError, match=r"did not answer within 1 s") as caught:
            await sampler.sample(request())
        assert (caught.value.status, caught.value.code) == (504, "engine_timeout")
        await until(lambda: fake.disconnected == 2, "both disconnections")


async def test_requests_at_once_are_bounded(distribution: Distribution, byte_model: Path) -> None:
    fake = FakeVllm(distribution, Faults())
    with serving(fake.app) as url:
        upstream = Upstream(url, max_in_flight=3)
        fake.faults = Faults(delay_s=0.02)
        asked = request(max_tokens=2)
        await asyncio.gather(*(VllmServer(upstream).sample(asked, "served") for _ in range(15)))
        await upstream.aclose()
        assert fake.most_in_flight == 3
        fake.faults = Faults(hang=True)
        upstream = Upstream(url, max_in_flight=1, timeout_s=0.2)
        with pytest.raises(GatewayError, match="did not answer") as hanging:
            await VllmServer(upstream).sample(asked, "served")
        async with upstream.slot():
            with pytest.raises(GatewayError, match=r"1 requests open for 0\.2 s; retry") as waiting:
                await VllmServer(upstream).sample(asked, "served")
        await upstream.aclose()
    assert (hanging.value.status, waiting.value.status) == (504, 503)


# Policy versions


async def test_weights_have_the_version_that_the_server_gives_them(
    distribution: Distribution, byte_model: Path
) -> None:
    """Those without a number are foreign. A server that was started again has lost its number, and is refused
    once, for it samples from the weights that it had at first."""
    fake = FakeVllm(distribution, Faults(weights=["7"]))
    async with opened(fake, byte_model) as sampler:

        async def versions() -> tuple[int, int | None]:
            result = await sampler.sample(request())
            return result.policy_version, result.policy_version_end

        assert await versions() == (7, None)
        fake.faults.weights = ["7", "8"]
        assert await versions() == (7, 8), "the oldest weights: the larger lag"
        assert await versions() == (8, None)
        changes: list[tuple[list[str], int]] = [([], -1), (["9"], 9), (["default"], -1)]
        for names, version in changes:
            fake.faults.weights = names
            with pytest.raises(GatewayError, match="not both numbers") as refused:
                await sampler.sample(request())
            assert refused.value.status == 503
            assert await versions() == (version, None)
