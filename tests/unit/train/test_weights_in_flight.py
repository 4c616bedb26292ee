"""Weights move in flight: what one version has begun to sample, the next ones go on with, at any token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from interchange_helpers import until
from rollout_helpers import make_call, make_episode, make_group, update
from run_ledger import KeptRows
from small_models import sft_datum
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import Call, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.sampler import (
    Progress,
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.train.backends.backend import Publisher
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.policy import Policy
from trainer_fakes import made_learner

# What is asked of each version


class OneToken(Sampler):
    """Samples one token of each sequence, its version, and is cut; so often that the reply has `length`."""

    def __init__(self, version: int, asked: list[SampleRequest], length: int) -> None:
        self.version, self._asked, self._length = version, asked, length
        self.is_cut = asyncio.Event()
        self.failing = False

    def cut(self) -> None:
        self.is_cut.set()

    def _experts(self, request: SampleRequest) -> bytes:
        """The version, for each token that is not known."""
        return bytes([self.version]) * (len(request.prompt) // 4 - request.known + 1)

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self._asked.append(request)
        if self.failing:
            raise GatewayError(503, "engine_unavailable", "the replica is gone")
        one: dict[str, Any] = {
            "sampled": pack_ids([self.version]),
            "logprobs": pack_logprobs([-0.25 * self.version]),
            "top_ids": pack_ids([1, 2]),
            "top_logprobs": pack_logprobs([-1, -2]),
        }
        if progress is not None:
            for index in range(request.num_samples):
                progress(Progress(index=index, offset=0, **one))
        goes_on = request.sampled + 1 < self._length
        if goes_on:
            await self.is_cut.wait()
        # The first of several choices ends before the others.
        cut = [goes_on and (index > 0 or request.num_samples == 1) for index in range(request.num_samples)]
        sequences = [
            SampledSequence(
                stop_reason="stop", is_cut=each, constrained=b"\x01", experts=self._experts(request), **one
            )
            for each in cut
        ]
        return SampleResult(sequences=sequences, policy_version=self.version, seed=request.seed)


class OneTokenEach(Publisher):
    max_context = 100

    def __init__(self, length: int) -> None:
        self.asked: list[SampleRequest] = []
        self.samplers: list[OneToken] = []
        self._length = length

    async def publish(self, policy_version: int) -> Sampler:
        self.samplers.append(OneToken(policy_version, self.asked, self._length))
        return self.samplers[-1]


async def over_versions(length: int, *, num_samples: int = 1, fails_at: int = -1) -> tuple[Any, Any, Any]:
    """The result of a call that one version after another goes on with, what was asked, and the progress."""
    publisher, reports = OneTokenEach(length), list[Progress]()
    policy = Policy(publisher, KeptRows(), seed=3, in_flight=True)
    await policy.publish()
    request = SampleRequest(prompt=pack_ids([7, 8]), max_tokens=9, num_samples=num_samples, top_logprobs=2)
    call = asyncio.create_task(policy.sample(request, reports.append))
    for version in range(1, length):
        asked = 1 + (version - 1) * max(1, num_samples - 1)
        await until(lambda asked=asked: len(publisher.asked) == asked)
        await policy.publish(version)
        publisher.samplers[-1].failing = version == fails_at
    return await call, publisher.asked, reports


async def test_a_version_is_asked_for_the_rest_after_exactly_what_was_sampled() -> None:
    result, asked, reports = await over_versions(4)
    assert [unpack_ids(each.prompt).tolist() for each in asked] == [
        [7, 8],
        [7, 8, 0],
        [7, 8, 0, 1],
        [7, 8, 0, 1, 2],
    ]
    assert [each.max_tokens for each in asked] == [9, 8, 7, 6], "all of it counts"
    assert [each.sampled for each in asked] == [0, 1, 2, 3]
    seeds = [each.seed for each in asked]
    assert (seeds[0], len(set(seeds))) == (result.seed, 4)
    assert seeds == [each.seed for each in (await over_versions(4))[1]], "a repeated run has the same"
    (sequence,) = result.sequences
    assert unpack_ids(sequence.sampled).tolist() == [0, 1, 2, 3]
    assert unpack_logprobs(sequence.logprobs).tolist() == [0, -0.25, -0.5, -0.75]
    assert unpack_ids(sequence.top_ids).tolist() == [1, 2] * 4
    assert sequence.constrained == b"\x01" * 4
    assert sequence.experts == bytes([0, 0, 0, 1, 2, 3]), "the prompt's are the first version's"
    assert sequence.spans == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert (sequence.is_cut, sequence.stop_reason) == (False, "stop")
    assert [(each.index, each.offset, unpack_ids(each.sampled).tolist()) for each in reports] == [
        (0, offset, [offset]) for offset in range(4)
    ]


async def test_each_choice_has_spans_of_its_own() -> None:
    result, asked, reports = await over_versions(3, num_samples=3)
    assert [each.num_samples for each in asked] == [3, 1, 1, 1, 1]
    assert len({each.seed for each in asked}) == 5
    assert [each.spans for each in result.sequences] == [[], *[[(0, 0), (1, 1), (2, 2)]] * 2]
    assert [unpack_ids(each.sampled).tolist() for each in result.sequences] == [[0], [0, 1, 2], [0, 1, 2]]
    assert sorted((each.index, each.offset) for each in reports) == [
        (0, 0),
        *((index, offset) for index in (1, 2) for offset in range(3)),
    ]


async def test_what_fails_for_a_version_that_goes_on_fails_the_call() -> None:
    with pytest.raises(GatewayError, match="the replica is gone"):
        await over_versions(3, num_samples=3, fails_at=2)


async def test_without_it_a_call_ends_with_the_weights_that_it_began_with() -> None:
    publisher = OneTokenEach(2)
    policy = Policy(publisher, KeptRows())
    await policy.publish()
    await policy.publish()
    assert [each.is_cut.is_set() for each in publisher.samplers] == [False, False]


# The embedded engine


@pytest.fixture(params=[None, LoraSettings(4, targets=("attn",), seed=3)], ids=["all weights", "lora"])
def trainable(request: pytest.FixtureRequest, random_model: Path, tmp_path: Path) -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path, seed=3, lora=request.param) as engine:
        yield engine


class Flown:
    """A policy whose weights change a lot with each version, and a client of every version."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.backend = EmbeddedBackend(engine)
        self.policy = Policy(self.backend, KeptRows(), seed=11, in_flight=True)
        self.versions: list[Any] = []
        self.wanted = asyncio.Event()
        """Set when the next version is to be published."""

    async def publish(self) -> None:
        if self.versions:
            ids = np.random.default_rng(len(self.versions)).integers(2, 64, 24)
            await self.backend.client.forward_backward([sft_datum(ids)], "cross_entropy")
            await self.backend.client.optim_step(tinker.AdamParams(learning_rate=0.01))
        await self.policy.publish(len(self.versions))
        self.versions.append(await self.engine.create_sampling_client())

    @asynccontextmanager
    async def publishing(self) -> AsyncGenerator[None]:
        """While the context is open, whenever it is wanted."""

        async def publish() -> None:
            while True:
                await self.wanted.wait()
                self.wanted.clear()
                await self.publish()

        task = asyncio.create_task(publish())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def recorded(prompt: list[int], result: SampleResult, sequence: SampledSequence) -> Call:
    """A choice as the gateway records it."""
    spans = sequence.spans or [(result.policy_version, 0)]
    return make_call(
        None,
        prompt,
        unpack_ids(sequence.sampled).tolist(),
        logprobs=unpack_logprobs(sequence.logprobs).tolist(),
        policy_version=spans[0][0],
        spans=spans if len(spans) > 1 else [],
        stop_reason=sequence.stop_reason,
    )


async def test_of_calls_over_publications_at_random_tokens_nothing_is_lost_or_doubled(
    trainable: EmbeddedEngine,
) -> None:
    """Every token is there once, as the version of its span gives it after its own prefix."""
    flown, rng, calls = Flown(trainable), np.random.default_rng(5), list[Call]()
    number = 700 if trainable.is_lora else 100  # Every second has two choices.
    at_once = asyncio.Semaphore(100)  # Each publication makes the engine read all that run again.
    until_next = number // 2
    await flown.publish()

    async def ask(choices: int) -> None:
        prompt = rng.integers(2, 64, rng.integers(1, 12)).tolist()
        streamed: list[list[int]] = [[] for _ in range(choices)]

        def report(news: Progress) -> None:
            nonlocal until_next
            assert news.offset == len(streamed[news.index]), "no gap, and nothing twice"
            streamed[news.index] += unpack_ids(news.sampled).tolist()
            until_next -= 1
            if until_next <= 0:
                until_next = int(rng.integers(number // 2, 2 * number))
                flown.wanted.set()

        request = SampleRequest(prompt=pack_ids(prompt), max_tokens=24, num_samples=choices)
        async with at_once:
            result = await flown.policy.sample(request, report)
        calls.extend(recorded(prompt, result, sequence) for sequence in result.sequences)
        assert [unpack_ids(each.sampled).tolist() for each in result.sequences] == streamed

    async with flown.publishing():
        await asyncio.gather(*(ask(1 + turn % 2) for turn in range(number)))
    assert len(calls) == number * 1.5
    lengths: list[int] = []
    for call in calls:
        (rollout,) = merge_calls([call], episode_uuid="e")
        (segment,) = rollout.segments
        length = len(call.sampled_ids)
        assert length == 24 or (call.stop_reason, call.sampled_ids[-1]) == ("stop", 1)
        assert all(a < b and i < j < length for (a, i), (b, j) in pairwise(call.spans))
        known = tinker.ModelInput.from_ints(rollout.tokens.tolist())
        for version, span in segment.versions:
            wanted = (await flown.versions[version].compute_logprobs(known))[span]
            np.testing.assert_allclose(rollout.logprobs[span], np.array(wanted, np.float32), atol=1e-4)
        lengths.append(len(segment.versions))
    assert max(lengths) >= 3
    assert sum(length > 1 for length in lengths) > number / 10


async def test_what_is_pinned_is_sampled_by_one_version_over_all_publications(
    trainable: EmbeddedEngine,
) -> None:
    """In its calls that run, in those that follow, and with the tokens of a run that publishes nothing."""

    async def calls(flown: Flown, *, publishing: bool) -> list[Call]:
        found = list[Call]()

        async def ask(prompt: list[int], episode: str) -> Call:
            request = SampleRequest(prompt=pack_ids(prompt), max_tokens=24, affinity=episode)

            def report(_: Progress) -> None:
                if publishing:
                    flown.wanted.set()

            result = await flown.policy.sample(request, report)
            return recorded(prompt, result, result.sequences[0])

        with flown.policy.pinned([f"e{i}" for i in range(8)]) as version:
            for turn in range(3):
                asked = (ask([7, 8, turn + i], f"e{i}") for i in range(8))
                found += await asyncio.gather(*asked)
        if publishing:
            moved = await ask([7, 8, 9], "e0")
            assert version == 0
            assert moved.policy_version > 0, "it is pinned no more"
        return found

    flown = Flown(trainable)
    await flown.publish()
    still = await calls(flown, publishing=False)
    async with flown.publishing():
        moving = await calls(flown, publishing=True)
    assert len(flown.versions) > 3
    assert {(call.policy_version, *call.spans) for call in moving} == {(0,)}
    assert [call.sampled_ids.tolist() for call in moving] == [call.sampled_ids.tolist() for call in still]


async def test_each_token_is_compared_and_trains_as_what_its_own_weights_sampled(
    trainable: EmbeddedEngine,
) -> None:
    flown, prompt, spans = Flown(trainable), [5, 9, 4], [(0, 0), (1, 4), (2, 9)]
    choices: list[tuple[list[int], list[float]]] = [([], []) for _ in range(4)]
    for number in (4, 5, 6):
        await flown.publish()
        for seed, (ids, logprobs) in enumerate(choices):
            params = tinker.SamplingParams(max_tokens=number, seed=seed, stop=[])
            known = tinker.ModelInput.from_ints([*prompt, *ids])
            (part,) = (await flown.versions[-1].sample(known, 1, params)).sequences
            ids += part.tokens
            logprobs += part.logprobs or []
    calls = [
        make_call(None, prompt, ids, logprobs=logprobs, policy_version_end=2, spans=spans)
        for ids, logprobs in choices
    ]
    episodes = [make_episode([call], float(i == 0), f"e{i}") for i, call in enumerate(calls)]
    learner = made_learner(flown.backend.client)
    found = learner.report
    metrics = await update(learner, [make_group(episodes)], step=3, lag_of_version={0: 2, 1: 1, 2: 0})
    assert metrics["train/sequences"] == 4
    assert {lag: gap.tokens for lag, gap in found.whole.gaps.items()} == {2: 16, 1: 20, 0: 24}
    assert found.max_abs_dlogp < 1e-4
    assert min(found.whole.gaps[lag].max_abs for lag in (1, 2)) > 1e-2
