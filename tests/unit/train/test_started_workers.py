"""A run starts its workers, and releases the claims of one that dies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkerscript.config import RunConfig, WorkersConfig
from tinkerscript.processes.children import LOCAL_WORKERS, start_workers
from tinkerscript.processes.launcher import Child, Launcher, Started
from tinkerscript.processes.planned import plan_of
from tinkerscript.processes.supervisor import Supervisor


class Link:
    """What the workers' side uses of a trainer's link."""

    own_clients = "worker-abc-"

    def __init__(self) -> None:
        self.released: list[str] = []

    def release_client(self, name: str, reason: str) -> None:
        self.released.append(name)


class Idle(Started):
    """Runs until it is asked to stop."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.host, self.port = "here", 0
        self.argv = child.argv(child.restarts)
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        return await self.ended

    def ask_to_stop(self) -> None:
        self.ended.set_result(0)

    def kill(self) -> None:
        self.ended.set_result(-9)


class Recorder(Launcher):
    def __init__(self) -> None:
        self.started: list[Idle] = []
        self.restarted = asyncio.Event()

    async def start(self, child: Child) -> Started:
        self.started.append(Idle(child))
        if len(self.started) == 2:
            self.restarted.set()
        child.on_start(self.started[-1])
        return self.started[-1]

    def names(self) -> list[str]:
        """The client uuids of those that run."""
        return [each.argv[-2] for each in self.started if each.returncode is None]


async def test_a_dead_worker_is_released_by_the_name_that_it_had(tmp_path: Path) -> None:
    config, launcher, link = RunConfig(workers=WorkersConfig(script="s.py", count=1)), Recorder(), Link()
    planned = [process for process in plan_of(config, tmp_path) if process.name.startswith("worker ")]
    async with Supervisor(max_restarts=0, note=print, launcher=launcher) as supervisor:
        likeness: Any = link
        await start_workers(planned, tmp_path, link=likeness, server_url="http://here", supervisor=supervisor)
        launcher.started[0].kill()
        async with asyncio.timeout(10):
            await launcher.restarted.wait()
        assert link.released == ["worker-abc-0-0"]
        assert launcher.names() == ["worker-abc-0-1"]
        environ: Mapping[str, str] = launcher.started[1].child.environ
        assert environ["TINKERSCRIPT_SERVER_URL"] == "http://here"
        assert launcher.started[1].argv[0] == sys.executable
    assert (tmp_path / LOCAL_WORKERS).read_text().split() == ["worker-abc-0-0", "worker-abc-0-1"]
