"""What Ray reserves, starts and says of its ends, without a run around it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from virtual_cluster import VirtualCluster, left_of

from tinkerscript.config import RunConfig, parse_config
from tinkerscript.errors import ConfigError
from tinkerscript.processes.launcher import Child, Launcher, Resources, Slot, Started
from tinkerscript.processes.planned import plan_of
from tinkerscript.processes.ray_launcher import open_launcher

pytestmark = pytest.mark.timeout(900)

TEXT = """
cluster: {launcher: ray, address: "ADDRESS"}
engine: {device: cuda, lora: {rank: 1}}
inference: {backend: vllm, launch: {replicas: 1, tensor_parallel: 2, gpus: any}}
workers: {count: 0}
"""


def config_of(address: str, *overrides: str) -> RunConfig:
    return parse_config(TEXT.replace("ADDRESS", address), source="test", overrides=list(overrides))


@asynccontextmanager
async def opened(
    folder: Path, config: RunConfig, notes: list[str], room_s: float = 300
) -> AsyncIterator[Launcher]:
    (folder / "logs").mkdir(exist_ok=True)
    async with open_launcher(config, plan_of(config, folder), folder, notes.append, room_s) as launcher:
        yield launcher


SMALL = Resources(0.1)


def child(folder: Path, name: str, code: str, *arguments: str, resources: Resources = SMALL) -> Child:
    log = folder / "logs" / f"{name.replace(' ', '-')}.log"
    argv = [sys.executable, "-c", code, *arguments]
    return Child(name, lambda _: argv, log, environ={"SECRET": "s3cret"}, resources=resources)


async def until_up(process: Started, log: Path) -> None:
    while not (log.exists() and b"up" in log.read_bytes()):
        assert process.returncode is None, log.read_text()
        await asyncio.sleep(0.05)


SHOW = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['SECRET'], *sys.argv[1:])"
UNTIL_ASKED = "import sys; print('up', flush=True); sys.stdin.read(); print('asked')"
LEAVES_A_CHILD = "import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.exit(3)"
STUBBORN = (
    "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print('up', p.pid, flush=True); "
    "time.sleep(600)"
)


async def test_processes_get_their_gpus_ports_and_secrets_and_end_as_they_are_told(
    cluster: VirtualCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add(cpus=3, gpus=1)
    cluster.add(cpus=1, gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notes: list[str] = []
    async with opened(tmp_path, config_of(cluster.address), notes) as launcher:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0", "what Ray reserved for the trainer"
        shown = child(tmp_path, "replica 0", SHOW, Slot.HOST, Slot.PORT, resources=Resources(1, 2))
        first = await launcher.start(shown)
        waits, hangs = (child(tmp_path, name, code) for name, code in (("a", UNTIL_ASKED), ("b", STUBBORN)))
        asked = await launcher.start(waits)
        killed = await launcher.start(hangs)
        assert await first.wait() == 0
        assert shown.log.read_text() == f"0,1 s3cret {first.host} {first.port}\n"
        await until_up(asked, waits.log)
        asked.ask_to_stop()
        assert await asked.wait() == 0
        assert waits.log.read_text() == "up\nasked\n"
        await until_up(killed, hangs.log)
        assert psutil.pid_exists(int(hangs.log.read_text().split()[1]))
        killed.kill()
        assert await killed.wait() == -9
        assert killed.describe_end() == "signal 9"
        assert not left_of(tmp_path, "sleep 600", within_s=60)
        left = child(tmp_path, "c", LEAVES_A_CHILD)
        assert await (await launcher.start(left)).wait() == 3
        assert not left_of(tmp_path, "sleep 600", within_s=60), "although it held the output open"
    assert notes == []
    assert "s3cret" not in (tmp_path / "logs" / "ray.log").read_text()


async def test_a_run_for_which_there_is_no_room_says_what_it_needs(tmp_path: Path) -> None:
    message = r"no room within 3 s: the run needs 3 CPU and 3 GPU; Ray has \d+ CPU \(.* free\) and 0 GPU"
    with pytest.raises(ConfigError, match=message):
        async with opened(tmp_path, config_of(""), [], room_s=3):
            raise AssertionError("there is room")
    assert not left_of(tmp_path, "", within_s=60), "the run's own Ray ends with it"


async def test_a_cluster_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    with pytest.raises(
        ConfigError, match=r"cluster\.launcher: ray: cannot connect to Ray at 127\.0\.0\.1:1: "
    ):
        async with opened(tmp_path, config_of("127.0.0.1:1"), []):
            raise AssertionError("there is none")
