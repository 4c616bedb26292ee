"""How many workers a run has: as many as there is work for, between two bounds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clock import Clock
from tinkerscript.config import RunConfig, WorkersConfig
from tinkerscript.processes.children import LOCAL_WORKERS, Workers
from tinkerscript.processes.launcher import Child, Launcher, Started
from tinkerscript.processes.planned import plan_of
from tinkerscript.processes.supervisor import Supervisor
from tinkerscript.trainer_link.messages import Demand


class Link:
    """What the workers' side uses of a trainer's link."""

    own_clients = "worker-abc-"

    def __init__(self) -> None:
        self.demand = Demand()
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


@pytest.fixture
def config() -> RunConfig:
    return RunConfig(workers=WorkersConfig(script="s.py", count=1, max_count=4, concurrency=10))


def workers_of(config: RunConfig, folder: Path, supervisor: Supervisor, clock: Any) -> tuple[Workers, Link]:
    link: Any = Link()
    planned = [process for process in plan_of(config, folder) if process.name.startswith("worker ")]
    url = "http://here"
    return (
        Workers(planned, config, folder, link=link, server_url=url, supervisor=supervisor, clock=clock),
        link,
    )


async def test_workers_come_while_episodes_wait_and_leave_when_idle(
    config: RunConfig, tmp_path: Path
) -> None:
    clock, launcher = Clock(), Recorder()
    async with Supervisor(max_restarts=0, note=print, launcher=launcher) as supervisor:
        workers, link = workers_of(config, tmp_path, supervisor, clock)
        await workers.start()
        assert launcher.names() == ["worker-abc-0-0"]
        link.demand = Demand(waiting=25)
        await workers.scale()
        assert workers.number == 3
        link.demand = Demand(waiting=900, own_claims={"worker-abc-0-0": 10})
        await workers.scale()
        assert workers.number == 4, "the upper bound"
        claims = {"worker-abc-0-0": 4, "worker-abc-3-0": 1}
        link.demand = Demand(own_claims=claims)
        await workers.scale()
        clock.now += 59
        await workers.scale()
        assert workers.number == 4, "they are not idle for long"
        clock.now += 1
        await workers.scale()
        assert launcher.names() == ["worker-abc-0-0", "worker-abc-3-0"], "those with claims stay"
        link.demand = Demand()
        clock.now += 60
        await workers.scale()
        assert launcher.names() == ["worker-abc-0-0"], "the lower bound"
        link.demand = Demand(waiting=11)
        await workers.scale()
        assert launcher.names() == ["worker-abc-0-0", "worker-abc-1-1"], "a name is never used twice"
    assert not link.released, "none of them died"
    assert (tmp_path / LOCAL_WORKERS).read_text().split() == [
        f"worker-abc-{name}" for name in ("0-0", "1-0", "2-0", "3-0", "1-1")
    ]


async def test_a_dead_worker_is_released_by_the_name_that_it_had(config: RunConfig, tmp_path: Path) -> None:
    launcher = Recorder()
    async with Supervisor(max_restarts=0, note=print, launcher=launcher) as supervisor:
        workers, link = workers_of(config, tmp_path, supervisor, Clock())
        await workers.start()
        launcher.started[0].kill()
        async with asyncio.timeout(10):
            await launcher.restarted.wait()
        assert link.released == ["worker-abc-0-0"]
        assert launcher.names() == ["worker-abc-0-1"]
        environ: Mapping[str, str] = launcher.started[1].child.environ
        assert environ["TINKERSCRIPT_SERVER_URL"] == "http://here"
        assert launcher.started[1].argv[0] == sys.executable
