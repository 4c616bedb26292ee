"""Starting, stopping and restarting the trainer, and what the status says; small programs are trainers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from interchange_helpers import trainer, until
from link_server import Server, serving
from tinkerscript.errors import ConflictError
from tinkerscript.protocol import StartEngineRequest
from tinkerscript.server.routes.engine import SYNCED_CONFIG, EngineRoutes
from tinkerscript.trainer_link.server_end import TrainerEvent

START = StartEngineRequest()
FORCE = StartEngineRequest(force_restart=True)
WAITS = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); " + WAITS
)


@dataclass
class Engine:
    routes: EngineRoutes
    server: Server
    log: Path

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def status(self) -> str:
        return self.server.interchange.engine.status

    @property
    def failure(self) -> str:
        return self.server.interchange.engine.failure


@asynccontextmanager
async def engine(tmp_path: Path, program: str) -> AsyncGenerator[Engine]:
    """The routes of the engine whose trainer is the Python program `program`."""
    (tmp_path / SYNCED_CONFIG).write_text("seed: 1\n")
    async with serving(f"ipc://{tmp_path}/link", tmp_path) as server, asyncio.timeout(30):
        command = (sys.executable, "-S", "-c", program)
        interchange, link = server.interchange, server.link
        routes = EngineRoutes(tmp_path, interchange=interchange, link=link, trainer=command, ending_s=0.3)
        running = asyncio.create_task(routes.run())
        yield Engine(routes, server, tmp_path / "logs" / "trainer.log")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    for left in psutil.Process().children():
        left.kill()
    await until(lambda: not psutil.Process().children(), "the end of what ran")


async def test_an_engine_boots_until_it_says_something_whatever_its_predecessor_does(tmp_path: Path) -> None:
    async with engine(tmp_path, WAITS) as made:
        async with trainer(made.address) as former:
            await former.flush()
            former.set_status(engine_status="ENGINE.OFFLINE", run_finished=True)
            await former.flush()
            await made.routes.start_engine(START)
            await former.flush()
            assert (made.status, made.server.interchange.engine.run_finished) == ("ENGINE.BOOTING", False)
        made.server.handler.handle(TrainerEvent.SILENT)
        assert made.status == "ENGINE.BOOTING", "the silence is the former trainer's"
        async with trainer(made.address) as started:
            await started.flush()
            assert made.status == "ENGINE.ROLLING"
        await until(lambda: made.status == "ENGINE.OFFLINE", "the silence of the one that was started")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "print('x'); raise SystemExit('error: engine.model: there is no model at /nowhere')",
            "exit code 1: error: engine.model",
        ),
        ("raise KeyError('weights')", "exit code 1: KeyError: 'weights'"),
        ("import os; os._exit(3)", "exit code 3: it wrote nothing"),
    ],
)
async def test_the_status_says_why_a_trainer_did_not_boot(tmp_path: Path, program: str, reason: str) -> None:
    async with engine(tmp_path, program) as made:
        made.log.parent.mkdir()
        made.log.write_text("error: of an earlier trainer\n")
        await made.routes.start_engine(START)
        await until(lambda: made.status == "ENGINE.OFFLINE")
        assert reason in made.failure
        await made.routes.start_engine(START)
        assert made.failure == ""


async def test_a_trainer_that_was_asked_to_stop_has_not_failed(tmp_path: Path) -> None:
    async with engine(tmp_path, WAITS) as made:
        await made.routes.start_engine(START)
        with pytest.raises(ConflictError, match="running already"):
            await made.routes.start_engine(START)
        await made.routes.stop_engine()
        await until(lambda: made.status == "ENGINE.OFFLINE")
        assert made.failure == ""


async def test_a_forced_restart_ends_a_trainer_that_does_not_stop(tmp_path: Path) -> None:
    async with engine(tmp_path, STUBBORN) as made:
        await made.routes.start_engine(START)
        await until(lambda: made.log.read_text() == "up\n", "the trainer ignores SIGTERM")
        await made.routes.start_engine(FORCE)
        await until(lambda: made.log.read_text() == "up\nup\n", "another one runs")
        assert (made.status, made.failure) == ("ENGINE.BOOTING", "")
        await made.routes.start_engine(FORCE)


async def test_a_forced_restart_asks_a_trainer_that_was_started_by_hand(tmp_path: Path) -> None:
    async with engine(tmp_path, WAITS) as made, trainer(made.address) as by_hand:
        await by_hand.flush()
        with pytest.raises(ConflictError, match="connected already"):
            await made.routes.start_engine(START)
        forcing = asyncio.create_task(made.routes.start_engine(FORCE))
        await by_hand.stop_requested.wait()
        by_hand.set_status(engine_status="ENGINE.OFFLINE")
        assert (await forcing).success
        assert made.status == "ENGINE.BOOTING"
