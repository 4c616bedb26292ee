"""How workers end, as processes at a real server: drained by SIGTERM, at once, and with their run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from interchange_helpers import collect, new_episodes, until
from interchange_setup import serving
from tinkerscript.trainer_link.messages import EpisodeAccepted

WAITS = """
import asyncio, time
from pathlib import Path

{0}def rollout(episode):
    Path({1!r}, episode.episode_uuid + ".begun").touch()
    while not Path({1!r}, "go").exists():
        {2}sleep(0.02)
    return 1.0
"""
"""A rollout that waits for a file: plain, async, or async with code that blocks the event loop."""

WAYS = {"plain": ("", "time."), "async": ("async ", "await asyncio."), "blocking": ("async ", "time.")}


@dataclass
class Workers:
    """Worker processes, with what they log in a folder."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, url: str, *arguments: str, log: str = "worker.log") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tinkerscript", "worker", "--server", url, *arguments]
        with (self.folder / log).open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=output)
        self.processes.append(process)
        return process

    def script(self, way: str) -> str:
        path = self.folder / f"{way}.py"
        is_async, sleep = WAYS[way]
        path.write_text(WAITS.format(is_async, str(self.folder), sleep))
        return str(path)

    def log(self, name: str = "worker.log") -> str:
        return (self.folder / name).read_text()

    async def begun(self, *uuids: str) -> None:
        for uuid in uuids:
            await until(lambda uuid=uuid: (self.folder / f"{uuid}.begun").exists(), f"{uuid} runs")

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    (tmp_path / "workers").mkdir()
    found = Workers(tmp_path / "workers")
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


async def ended(process: subprocess.Popen[bytes], within_s: float) -> int:
    """Its exit code. The server is in this process, so nothing here may block."""
    began = time.monotonic()
    await until(lambda: process.poll() is not None, "the worker's end")
    assert time.monotonic() - began < within_s
    return process.returncode


async def test_sigterm_lets_episodes_finish(tmp_path: Path, byte_model: Path, workers: Workers) -> None:
    """A worker that drains claims nothing more; its exit code says that there may be work left."""
    async with serving(tmp_path, byte_model) as setup:
        await setup.link.register(new_episodes("e1"))
        worker = workers.start(setup.url, workers.script("plain"), "--concurrency", "2")
        await workers.begun("e1")
        worker.send_signal(signal.SIGTERM)
        await until(lambda: "SIGTERM: no more claims; 1 episodes have 20 s" in workers.log(), workers.log())
        await setup.link.register(new_episodes("e2"))
        workers.go()
        assert await ended(worker, within_s=20) == 130
        (outcome,) = (await collect(setup.link, 1)).values()
        assert isinstance(outcome, EpisodeAccepted)
        assert (outcome.episode_uuid, outcome.attempt) == ("e1", 1)
        assert (await setup.status()).episodes["train"].registered == 1


@pytest.mark.parametrize("way", ["plain", "async"])
async def test_what_does_not_finish_is_handed_out_again_at_once(
    way: str, tmp_path: Path, byte_model: Path, workers: Workers
) -> None:
    """Without a failed attempt: the episode may be claimed once."""
    async with serving(tmp_path, byte_model, max_attempts=1) as setup:
        await setup.link.register(new_episodes("e1"))
        worker = workers.start(setup.url, workers.script(way), "--drain-timeout", "0.1")
        await workers.begun("e1")
        worker.send_signal(signal.SIGTERM)
        assert await ended(worker, within_s=10) == 130
        assert "handed_back=1" in workers.log()
        assert (await setup.claim(client="next")).attempt == 2
        assert not (await setup.status()).quarantined


@pytest.mark.parametrize(("way", "second"), [("plain", signal.SIGINT), ("blocking", signal.SIGTERM)])
async def test_a_second_signal_ends_a_worker_at_once(
    way: str, second: signal.Signals, tmp_path: Path, byte_model: Path, workers: Workers
) -> None:
    async with serving(tmp_path, byte_model) as setup:
        await setup.link.register(new_episodes("e1"))
        worker = workers.start(setup.url, workers.script(way), "--drain-timeout", "600")
        await workers.begun("e1")
        worker.send_signal(signal.SIGTERM)
        if way == "blocking":  # Nothing can be logged; the handler has run once the signal is not pending.
            await until(lambda: not _is_pending(worker.pid, signal.SIGTERM), "the first signal")
        else:
            await until(lambda: "SIGTERM" in workers.log(), "the first signal")
        assert worker.poll() is None
        worker.send_signal(second)
        assert await ended(worker, within_s=2) == 130


def _is_pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    ]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [("", 0, "The run is finished."), ("OSError: disk full", 1, "The run has failed: OSError: disk full")],
)
async def test_a_runs_end_reaches_every_worker_though_the_server_goes_away(
    failure: str, code: int, said: str, tmp_path: Path, byte_model: Path, workers: Workers
) -> None:
    """The one that waits for an episode, and one whose slots are all at work. Exit code 1: whoever starts
    workers again may do so for the resumed run."""
    async with serving(tmp_path, byte_model) as setup:
        await setup.link.register(new_episodes("e1"))
        way = "async" if failure else "plain"
        started = [workers.start(setup.url, workers.script(way), "--concurrency", "1", log="busy.log")]
        await workers.begun("e1")
        started.append(workers.start(setup.url, workers.script("plain"), log="idle.log"))
        await until(lambda: "waiting for an episode" in workers.log("idle.log"), "an idle worker")
        setup.link.set_status(run_finished=True, engine_status="ENGINE.OFFLINE", failure=failure)
        await setup.link.flush()
    for process, name in zip(started, ("busy", "idle"), strict=True):
        assert await ended(process, within_s=15) == code, workers.log(f"{name}.log")
        assert workers.log(f"{name}.log").count(said) == 1
        assert "waiting for the server" not in workers.log(f"{name}.log")
