"""Replicas of vLLM, as its API is: the fake, which applies adapters with PEFT to the model that trains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference_fakes import CONTEXT, Faults
from interchange_helpers import until
from peft_vllm import PeftVllm
from serving import serving
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.train.replicas.pool import Published
from tinkerscript.vllm_plugin import WeightSource
from trained_adapter import trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.xdist_group("peft"),  # Importing it takes longer than a test.
]


@contextmanager
def vllm(folder: Path) -> Iterator[tuple[PeftVllm, str]]:
    """A replica that finds weights in the run's `folder`."""
    source = WeightSource(str(folder / "adapters"))
    fake = PeftVllm(TINY_MODEL, source, Faults(models=("base",), logprobs="processed"))
    with serving(fake.app) as url:
        yield fake, url
    source.close()


def held(fake: PeftVllm) -> list[str]:
    """Versions of the policy that the server has loaded."""
    return [name.split("-")[2] for name in fake.adapters if name.startswith("policy-")]


async def test_each_version_is_loaded_proved_sampled_and_unloaded(tmp_path: Path) -> None:
    with vllm(tmp_path) as (fake, url):
        fake.faults.weights = ["7"]  # The server's own weights, and no version of an adapter.
        async with trained(tmp_path, [url], targets=["q_proj", "down_proj"]) as at:
            for version in range(3):
                await at.publisher.publish(version)
                assert await at.ask(version) == version
                asked = fake.requests[-1]
                assert asked["model"] == asked["cache_salt"]
                assert asked["model"].startswith("policy-")
                await at.step(1e-3)
            assert [at.verdicts(version) for version in range(3)] == [["unchanged"], *[["proved"]] * 2]
            assert at.pool.max_gap < 1e-4
            await until(lambda: held(fake) == ["1", "2"], "the older ones left the server")
            assert not [name for name in fake.adapters if name.startswith("canary-") and "none" not in name]
            # The previous version in the place of the new one does not sample.
            folder = await at.written(3)
            fake.lies[folder.name] = fake.requests[-1]["model"]
            publishing = asyncio.create_task(at.pool.publish(Published(3, folder)))
            await until(lambda: bool(at.notes), "the replica is lost over it")
            assert "it samples from another version" in at.notes[0]
            fake.lies.clear()
            await publishing
            assert at.verdicts(3)[-1] == "proved"
            assert await at.ask(3) == 3
            # A server that was started again has none of those that it is asked to forget.
            at.notes.clear()
            fake.restart()
            at.pool.lose(at.pool.replicas[0], "died")
            await until(lambda: len(at.notes) > 1, "it is back, or not")
            assert at.notes[-1].endswith("samples again")
            assert await at.ask(3) == 3
            assert set(held(fake)) == {"2", "3"}


async def test_calls_wait_while_replicas_sleep(tmp_path: Path) -> None:
    with vllm(tmp_path) as (fake, url):
        async with trained(tmp_path, [url], targets=["q_proj"], sleep=True) as at:
            await at.publisher.publish(0)
            fake.faults.delay_s = 60.0
            running = asyncio.create_task(at.ask(0))
            await until(lambda: fake.in_flight == 1)
            fake.faults.delay_s = 0.0
            async with at.publisher.resting():
                assert fake.controls == ["/wake_up", "/sleep"]
                waiting = asyncio.create_task(at.ask(0))
                await at.step(1e-3)
                assert not running.done()
                assert not waiting.done()
            assert fake.controls[2:] == ["/wake_up"]
            assert [await running, await waiting] == [0, 0]
            assert not at.notes


async def test_all_weights_take_the_place_of_the_older_ones(tmp_path: Path) -> None:
    with vllm(tmp_path) as (fake, url):
        async with trained(tmp_path, [url], rank=0) as at:
            for version in range(3):
                await at.publisher.publish(version)
                assert await at.ask(version) == version
                assert fake.requests[-1]["model"] == "base"
                await at.step(1e-3)
            assert [at.verdicts(version) for version in range(3)] == [["unchanged"], ["proved"], ["proved"]]
            assert at.pool.max_gap < 1e-4
            # A call that waits while weights are replaced is sampled by those that come.
            fake.faults.delay_s = 60.0
            call = asyncio.create_task(at.ask(2))
            await until(lambda: fake.in_flight == 1)
            fake.faults.delay_s = 0.0
            await at.publisher.publish(3)
            assert not call.done()
            await at.publisher.announce(3)
            assert await call == 3
            # Weights that the server was given and did not take are found out.
            await at.step(1e-3)
            folder = await at.written(3)
            fake.applies = False
            publishing = asyncio.create_task(at.pool.publish(Published(4, folder)))
            await until(lambda: bool(at.notes), "the replica is lost over it")
            assert "it samples from another version" in at.notes[0]
            fake.applies = True
            await publishing
            assert at.verdicts(4)[-1] == "proved"


@pytest.mark.parametrize("rank", [8, 0], ids=["adapters", "all weights"])
async def test_new_weights_go_on_with_a_call(tmp_path: Path, rank: int) -> None:
    with vllm(tmp_path) as (fake, url):
        async with trained(tmp_path, [url], rank=rank, targets=["q_proj"], on_publish="continue") as at:
            fake.streamed = 20

            async def begun(version: int) -> None:
                await until(lambda: fake.sent == 20 * version)
                if version == 3:  # What it has sampled is sampled again, and what others have is kept.
                    fake.streamed = CONTEXT
                    at.pool.lose(at.pool.replicas[0], "died")

            sequence, gap = await at.fly(2, 70, begun)
            assert [version for version, _ in sequence.spans] == [0, 1, 2]
            assert [first for _, first in sequence.spans] == [0, 20, 40]
            assert len(sequence.sampled) == 4 * 70
            assert gap < 1e-4
            asked = [body for body in fake.requests if body["stream"]]
            assert [len(body["prompt"]) for body in asked] == [5, 25, 45, 45]
            assert [body["max_tokens"] for body in asked] == [70, 50, 30, 30]
            assert len({body["cache_salt"] for body in asked}) == 3, "no version has the cache of another one"


async def test_a_call_keeps_what_it_has_while_replicas_sleep(tmp_path: Path) -> None:
    with vllm(tmp_path) as (fake, url):
        async with trained(tmp_path, [url], targets=["q_proj"], sleep=True, on_publish="continue") as at:
            fake.streamed = 20

            async def begun(version: int) -> None:
                await until(lambda: fake.sent == 20 * version)
                async with at.publisher.resting():
                    assert "/sleep" in fake.controls
                    fake.streamed = CONTEXT

            sequence, gap = await at.fly(0, 50, begun)
            assert sequence.spans == [(0, 0)]
            assert len(sequence.sampled) == 4 * 50
            assert gap < 1e-4
            assert [len(body["prompt"]) for body in fake.requests if body["stream"]] == [5, 25]


async def test_a_server_with_all_weights_that_was_started_again_gets_them_again(tmp_path: Path) -> None:
    """Nobody tells the run of it, and its own weights are never recorded as a version."""
    with vllm(tmp_path) as (fake, url):
        async with trained(tmp_path, [url], rank=0) as at:
            for version in range(2):
                await at.publisher.publish(version)
                await at.step(1e-2)
            assert await at.ask(1) == 1
            fake.restart()
            assert await at.ask(1) == 1
            assert fake.faults.weights == ["1"]
            assert "weights changed from 1 to None" in at.notes[0]
            assert at.verdicts(1) == ["proved", "proved"]
            # Other weights than those of the run are not one of its versions either.
            fake.faults.weights = ["7"]
            assert await at.ask(1) == 1
            assert "it samples from other weights than those of version 1" in at.notes[-2]


async def test_a_server_that_was_left_paused_or_asleep_samples_again(tmp_path: Path) -> None:
    with vllm(tmp_path) as (fake, url):
        async with trained(tmp_path, [url], rank=0, sleep=True) as at:
            assert fake.controls == ["/resume", "/wake_up", *fake.controls[2:]], "by a run that was killed"
            fake.fails = "/update_weights"
            publishing = asyncio.create_task(at.publisher.publish(0))
            await until(lambda: bool(at.notes), "the replica is lost over it")
            assert "did not take version 0" in at.notes[0]
            fake.fails = ""
            await publishing
            assert await at.ask(0) == 0


async def test_a_server_that_ignores_adapters_is_refused(tmp_path: Path) -> None:
    with vllm(tmp_path) as (fake, url):
        fake.applies = False
        with pytest.raises(ConfigError, match="does not apply adapters as the trainer does: canary-"):
            async with trained(tmp_path, [url]):
                raise AssertionError("it is refused before")


async def test_a_key_that_is_not_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH_KEY is not set"):
        async with trained(tmp_path, ["http://127.0.0.1:1"], api_key_env="NO_SUCH_KEY"):
            raise AssertionError("it is refused before")
