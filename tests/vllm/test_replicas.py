"""What a vLLM replica that others started may do wrong, and what the trainer finds."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from vllm_server import RunningVllm, running_vllm

from interchange_helpers import eventually, until
from tinkerscript.train.replicas.pool import Published
from tinkerscript.train.replicas.publisher import PROOFS
from trained_adapter import Trained, trained

pytestmark = pytest.mark.timeout(400)

DTYPES = ("float32", pytest.param("bfloat16", marks=pytest.mark.long))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningVllm]]:
    """One for each dtype that is asked for, which takes a minute of processor time to start."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:

        class Started(dict[str, RunningVllm]):
            def __missing__(self, dtype: str) -> RunningVllm:
                adapters = folder / dtype / "adapters"
                server = stack.enter_context(running_vllm(folder, adapters, dtype=dtype, max_loras=3))
                server.wait()
                self[dtype] = server
                return server

        yield Started()


def preload(server: RunningVllm, name: str, path: Path) -> None:
    """Put the adapter in `path` into the place of the one called `name`."""
    body = {"lora_name": name, "lora_path": str(path)}
    httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60).raise_for_status()


@pytest.fixture(params=DTYPES)
async def at(request: pytest.FixtureRequest, servers: dict[str, RunningVllm]) -> AsyncIterator[Trained]:
    server = servers[request.param]
    folder = server.log.parent / request.param
    (folder / PROOFS).unlink(missing_ok=True)
    async with trained(folder, [server.url], dtype=request.param) as made:
        yield made


async def test_another_adapter_in_the_place_of_the_new_one_is_never_proved(
    at: Trained, servers: dict[str, RunningVllm]
) -> None:
    server = servers[at.folder.name]
    await at.publisher.publish(0)
    for _ in range(4):
        await at.step(1e-3)
    await at.publisher.publish(1)
    assert at.verdicts(1) == ["proved"]
    older = at.folder_of(1)
    await at.step(1e-5)
    folder = await at.written(2)
    preload(server, folder.name, older)
    await at.pool.publish(Published(2, folder))
    first, *again = at.verdicts(2)
    exact = str(at.engine.dtype) == "torch.float32"
    assert first == ("refused" if exact else "undecidable")
    if exact:
        assert again == ["proved"], "the server was asked to load it anew"
        assert "it samples from another version" in at.notes[0]
    assert await at.ask(2) == 2
    for _ in range(8):
        await at.step(3e-3)
    folder = await at.written(3)
    (nothing,) = (at.folder / "adapters").glob("canary-none-*")
    preload(server, folder.name, nothing)
    await at.pool.publish(Published(3, folder))
    assert at.verdicts(3) == ["refused", "proved"]
    assert await at.ask(3) == 3


@pytest.mark.parametrize("at", ["float32"], indirect=True)
async def test_each_version_is_near_the_trainer_and_loads_no_other_files(at: Trained) -> None:
    for version in range(3):
        await at.publisher.publish(version)
        assert {await at.ask(version) for _ in range(8)} == {version}
        await at.step(1e-3)
    assert 0 < at.pool.max_gap < 1e-3
    print(f"largest gap {at.pool.max_gap:.1e}")
    await loads_only_its_own_files(at, 3, "adapter_model.safetensors")


async def loads_only_its_own_files(at: Trained, version: int, name: str) -> None:
    """The replica is lost over a file of the version before, and comes back with the right one."""
    folder = await at.written(version)
    right = (folder / name).read_bytes()
    shutil.copy(at.folder_of(version - 1) / name, folder / name)
    publishing = asyncio.create_task(at.pool.publish(Published(version, folder)))
    await until(lambda: bool(at.notes), "the replica is lost over it")
    assert f"did not take version {version}" in at.notes[0]
    (folder / name).write_bytes(right)
    await publishing
    assert at.verdicts(version) == ["proved"]
    assert await at.ask(version) == version


@pytest.mark.parametrize("at", ["float32"], indirect=True)
async def test_calls_that_hold_all_slots_move_and_a_new_version_does_not_wait(at: Trained) -> None:
    """Three slots, each held by long calls of a version of its own, when the fourth version comes."""
    calls: list[asyncio.Task[int]] = []
    try:
        for version in range(3):
            await at.publisher.publish(version)
            await at.step(1e-3)
            # Several, so that the server is slow enough to be at work on them until the end.
            for number in range(8):
                ask = at.ask(version, max_tokens=1000, episode=f"e{version}/{number}")
                calls.append(asyncio.create_task(ask))
            await until(lambda version=version: at.pool.replicas[0].in_flight[version] == 8)
        await asyncio.wait_for(at.publisher.publish(3), 60)
        assert at.pool.counts["moved"] == 8
        assert await asyncio.wait_for(at.ask(3), 30) == 3
        assert await asyncio.wait_for(calls[0], 120) >= 2, "it held the oldest adapter, and moved"
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_new_weights_go_on_with_a_call(servers: dict[str, RunningVllm]) -> None:
    server = servers["float32"]
    async with trained(server.log.parent / "float32", [server.url], on_publish="continue") as at:

        async def begun(version: int) -> None:
            """Another 30 tokens are sampled: the server counts them, and streams each at once."""
            before, replica = await at.pool.replicas[0].tokens_sampled(), at.pool.replicas[0]

            async def sampled() -> bool:
                return version == 4 or await replica.tokens_sampled() >= before + 30

            await eventually(sampled)

        sequence, gap = await at.fly(3, 1900, begun)
        assert [version for version, _ in sequence.spans] == [0, 1, 2, 3]
        assert gap < 1e-3
        print(f"spans {sequence.spans}, largest gap {gap:.1e}")


async def test_a_replica_that_hangs_is_lost_and_comes_back(
    servers: dict[str, RunningVllm], tmp_path: Path
) -> None:
    server = servers["float32"]
    folder = server.log.parent / "float32"
    async with trained(folder, [server.url], hang_s=4, prove_s=5) as at:
        await at.publisher.publish(0)
        server.engine().send_signal(signal.SIGSTOP)
        call = asyncio.create_task(at.ask(0, max_tokens=16))
        await until(lambda: bool(at.notes), "the hang is noticed")
        assert "has sampled nothing for" in at.notes[0]
        server.engine().send_signal(signal.SIGCONT)
        assert await call == 0
        assert at.notes[-1].endswith("samples again")


@pytest.mark.long
async def test_all_weights_are_replaced_checked_and_proved(tmp_path: Path) -> None:
    with running_vllm(tmp_path, tmp_path / "adapters") as server:
        server.wait()
        async with trained(tmp_path, [server.url], rank=0) as at:
            for version in range(3):
                await at.publisher.publish(version)
                assert {await at.ask(version) for _ in range(4)} == {version}
                await at.step(1e-3)
            assert [at.verdicts(version) for version in range(3)] == [["unchanged"], ["proved"], ["proved"]]
            assert 0 < at.pool.max_gap < 1e-3
            await at.pool.sleep()
            waiting = asyncio.create_task(at.ask(2))
            await at.pool.wake()
            assert await waiting == 2
            await loads_only_its_own_files(at, 3, "model.safetensors")
