"""What stands between the training loop and an engine: seeds, and waiting for a service."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tinker

from tinkerscript.errors import EngineError
from tinkerscript.train.patience import SlowCallNotifier, Waited
from tinkerscript.train.policy import SeededClient, SeedRecordingClient


class Recorder:
    """A sampling client that records the seeds it is asked with."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []

    async def sample(self, prompt: Any, num_samples: int, params: tinker.SamplingParams, *rest: Any) -> Any:
        self.seeds.append(params.seed)


async def asked(*prompts: list[int], seed: int = 1, step: int = 0, own: int | None = None) -> list[Any]:
    recorder: Any = Recorder()
    client = SeedRecordingClient(SeededClient(recorder, seed=seed, step=step), lambda _, most: most)
    for ids in prompts:
        params = tinker.SamplingParams(max_tokens=1, seed=own)
        await client.sample_async(tinker.ModelInput.from_ints(ids), 1, params)
    assert client.seeds == recorder.seeds
    return client.seeds


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
    recorder: Any = Recorder()
    client = SeededClient(recorder, seed=1, step=0, used={second})
    ids = np.array([5], np.int32)
    assert [client.seed_for(ids), client.seed_for(ids)] == [first, third]


async def test_a_long_wait_is_said_and_goes_on() -> None:
    notes: list[str] = []
    said = asyncio.Event()

    def note(message: str) -> None:
        notes.append(message)
        said.set()

    async def answer() -> int:
        await said.wait()
        return 7

    patience = SlowCallNotifier("http://there", note, say_after_s=0.01)
    assert await Waited(patience, answer(), "optim_step") == 7
    assert notes == ["waiting for http://there: optim_step, 0 s so far"]


async def test_what_a_service_refuses_is_an_error_of_the_engine() -> None:
    async def refused() -> None:
        raise tinker.TinkerError("no such model")

    with pytest.raises(EngineError, match="http://there: forward: no such model"):
        await SlowCallNotifier("http://there", print).wait(refused(), "forward")
