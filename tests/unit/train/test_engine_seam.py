"""What stands between the training loop and an engine: seeds, and waiting for a service."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from rich.console import Console

from rollout_helpers import make_call
from tinkerscript.config import EngineConfig, RunConfig, TrainingConfig
from tinkerscript.dashboard.terminal import SAY_AFTER_S, LineReporter
from tinkerscript.errors import AlignmentError, ConfigError, EngineError, GatewayError
from tinkerscript.gateway.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.processes.children import ServerAddress
from tinkerscript.rollouts.call import pack_ids, pack_logprobs
from tinkerscript.train import run
from tinkerscript.train.backends import BACKENDS, backend_named
from tinkerscript.train.backends.backend import FrozenSampler, Publisher, finish_despite_cancel
from tinkerscript.train.backends.tinker_service import SentCall, SlowCallNotifier, TinkerBackend
from tinkerscript.train.journal import Journal, PolicyPublished, read_journal
from tinkerscript.train.learning_rates import learning_rate
from tinkerscript.train.policy import Policy, SeededSampler
from tinkerscript.train.run import run_training
from tinkerscript.trainer_link.messages import EpisodeAccepted


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


async def test_counts_of_tokens_and_logprobs_that_differ_are_an_alignment_error() -> None:
    sampler = SeededSampler(Recorder(tokens=3, logprobs=2), seed=1, step=0, max_context=8)
    with pytest.raises(AlignmentError, match="the sampler answered 3 token ids and 2 log probabilities"):
        await sampler.sample(SampleRequest(prompt=pack_ids([5]), max_tokens=3))


class OneSampler(Publisher):
    """Publishes the same sampler again and again."""

    max_context = 8

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.published: list[int] = []

    async def publish(self, policy_version: int) -> Sampler:
        self.published.append(policy_version)
        return self.sampler


async def test_a_misaligned_sampler_breaks_the_policy(tmp_path: Path) -> None:
    request = SampleRequest(prompt=pack_ids([5]), max_tokens=3)
    with Journal(tmp_path / "journal.jsonl") as journal:
        backend = OneSampler(Recorder(tokens=3, logprobs=2))
        policy = Policy(backend, journal)
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
    events = read_journal(tmp_path / "journal.jsonl")
    assert events == [PolicyPublished(policy_version=0), PolicyPublished(policy_version=1, step=4)]


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
        ({"extra_stop_ids": [5]}, [5]),
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


def test_the_warm_up_ends_below_the_full_rate() -> None:
    config = TrainingConfig(learning_rate=1.0, warmup_steps=3, lr_schedule="constant")
    rates = [learning_rate(config, step, steps=10) for step in range(1, 6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_backend_is_one_of_the_table() -> None:
    assert backend_named("embedded").__name__ == "EmbeddedBackend"
    with pytest.raises(ConfigError, match=r"engine\.backend: 'jax' is not one of embedded, tinker"):
        backend_named("jax")


async def test_a_long_wait_is_said_and_goes_on() -> None:
    notes: list[str] = []
    said = asyncio.Event()

    def note(message: str) -> None:
        notes.append(message)
        said.set()

    async def answer() -> int:
        await said.wait()
        return 7

    notifier = SlowCallNotifier("http://there", note, first_note_s=0.01)
    assert await SentCall(notifier, answer(), "optim_step") == 7
    assert notes == ["waiting for http://there: optim_step, 0 s so far"]


class Screen(io.StringIO):
    """A terminal's output that is no terminal; `said` is set when it names a wait for the service."""

    def __init__(self) -> None:
        super().__init__()
        self.said = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "waiting for the Tinker service" in self.getvalue():
            self.said.set()
        return written


async def test_a_service_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()

    class Silent(TinkerBackend):
        @classmethod
        @asynccontextmanager
        async def open(cls, config: EngineConfig, model: Path, **_: Any) -> AsyncGenerator[TinkerBackend]:
            assert await asyncio.to_thread(screen.said.wait, 30), "nothing says what the run waits for"
            raise EngineError("that is all")
            yield

    async def server(*_: object, **__: object) -> ServerAddress:
        return ServerAddress("http://here", "", None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_server", server)
    monkeypatch.setitem(BACKENDS, "tinker", lambda: Silent)
    config = RunConfig.model_validate(
        {
            "engine": {"backend": "tinker", "base_url": "http://there"},
            "evaluation": {"episodes": 0},
            "workers": {"count": 0},
        }
    )
    assert SAY_AFTER_S == 2
    progress = LineReporter(Console(file=screen, width=200), say_after_s=0.01)
    with pytest.raises(EngineError, match="that is all"):
        await run_training(config, progress)
    assert "\nwaiting for the Tinker service (http://there)\n" in screen.getvalue()


async def test_what_a_service_refuses_is_an_error_of_the_engine() -> None:
    async def refused() -> None:
        raise tinker.TinkerError("no such model")

    with pytest.raises(EngineError, match="http://there: forward: no such model"):
        await SlowCallNotifier("http://there", print).wait(refused(), "forward")


class RecordingBackend(Publisher):
    """Samples with a `Recorder`, whatever the weights."""

    max_context = 8

    async def publish(self, policy_version: int) -> Sampler:
        return Recorder()


async def test_a_seed_of_a_result_that_is_kept_is_not_given_out_again(tmp_path: Path) -> None:
    """Two results are known before the weights are published, two come in afterwards."""
    *taken, free = await asked(*[[5]] * 5)
    backend: Any = RecordingBackend()
    with Journal(tmp_path / "journal.jsonl") as journal:
        policy = Policy(backend, journal, seed=1)
        for start in (0, 2):
            calls = [make_call(None, [5], [7], seed=seed) for seed in (*taken[start : start + 2], None)]
            kept = EpisodeAccepted(
                episode_uuid="e",
                attempt=1,
                client_uuid="c",
                reward=1.0,
                policy_version_at_claim=0,
                all_calls=calls,
            )
            policy.note(kept)
            if not start:
                await policy.publish()
        assert (await policy.sample(SampleRequest(prompt=pack_ids([5]), max_tokens=1))).seed == free
