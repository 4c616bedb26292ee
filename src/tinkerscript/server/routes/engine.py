"""`/start_engine` and `/stop_engine`: a trainer that this server starts, and asks to end.

Invariant: at most one trainer is started; it joins this server over the link like any other, goes on with the
run that the folder holds, and is asked to end when the server ends in order.

`/sync_train_config`: a config that a client hands in, checked against the models and kept for the engine.

Invariant: YAML is parsed safely and runs nothing; a config is taken only while the engine is OFFLINE.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.params import Depends

from tinkerscript.config import parse_config
from tinkerscript.errors import ConfigError, ConflictError
from tinkerscript.files import write_atomically
from tinkerscript.protocol import (
    StartEngineRequest,
    SuccessResponse,
    SyncTrainConfigRequest,
    SyncTrainConfigResponse,
)
from tinkerscript.server.interchange import EngineState, Interchange
from tinkerscript.trainer_link.messages import Stop
from tinkerscript.trainer_link.server_end import ServerLink

logger = logging.getLogger(__name__)


TRAINER_LOG = "trainer.log"


ENDING_S = 30.0
"""Seconds that `/start_engine` waits for a trainer that was asked to end."""


class EngineControl:
    """Starts and stops the trainer of one run folder. `run` ends what was started."""

    def __init__(self, run_dir: Path, *, interchange: Interchange, link: ServerLink) -> None:
        self._run_dir = run_dir
        self._interchange = interchange
        self._link = link
        self._trainer: Process | None = None
        self._starting = asyncio.Lock()
        self._started = asyncio.Event()
        self._asked_to_end = False
        self._ended = asyncio.Event()

    def router(self, dependencies: list[Depends]) -> APIRouter:
        """Both routes, each behind `dependencies`."""
        router = APIRouter(dependencies=dependencies)
        router.post("/start_engine")(self.start_engine)
        router.post("/stop_engine")(self.stop_engine)
        return router

    async def start_engine(self, body: StartEngineRequest) -> SuccessResponse:
        """Start a trainer with the config of `/sync_train_config`. Its output is in logs/trainer.log.

        One that was asked to end is waited for, up to 30 s.
        """
        async with self._starting:
            if self._asked_to_end and self._trainer is not None:
                await self._end_of_trainer()
            if self._trainer_is_there:
                raise ConflictError("a trainer is connected already; /stop_engine asks it to end")
            if self._trainer is not None:
                raise ConflictError(f"a trainer was started and has not ended (process {self._trainer.pid})")
            config = self._run_dir / SYNCED_CONFIG
            if not config.exists():
                raise ConflictError("there is no config to train with: POST /sync_train_config first")
            self._trainer = await self._spawn(config)
            self._asked_to_end = False
            self._ended.clear()
        self._interchange.set_status("ENGINE.BOOTING")
        self._started.set()
        return SuccessResponse(success=True)

    async def stop_engine(self) -> SuccessResponse:
        """Ask the trainer to end its run in order, whoever started it. The run can be resumed."""
        if self._link.connected:
            self._link.send(Stop(reason="/stop_engine"))
        elif self._trainer is not None:
            self._trainer.terminate()
        else:
            raise ConflictError("no trainer is connected")
        self._asked_to_end = True
        return SuccessResponse(success=True)

    async def run(self) -> None:
        """Watch each trainer that is started, until cancelled; then ask the last one to end."""
        try:
            while True:
                await self._started.wait()
                self._started.clear()
                await self._watch()
        finally:
            if self._trainer is not None and self._trainer.returncode is None:
                self._trainer.terminate()

    async def _spawn(self, config: Path) -> Process:
        log = self._run_dir / "logs" / TRAINER_LOG
        log.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tinkerscript", "train", str(config), "--join", str(self._run_dir)]
        with log.open("ab") as file:
            return await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def _trainer_is_there(self) -> bool:
        """One that has said goodbye, OFFLINE, is not."""
        return self._link.connected and self._interchange.engine.status != "ENGINE.OFFLINE"

    async def _end_of_trainer(self) -> None:
        """Return when it has ended, or after ENDING_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                await self._ended.wait()

    async def _watch(self) -> None:
        assert self._trainer is not None
        code = await self._trainer.wait()
        logger.info("trainer.ended code=%d log=%s", code, self._run_dir / "logs" / TRAINER_LOG)
        self._trainer = None
        self._ended.set()
        if not self._link.connected:
            self._interchange.set_status(self._interchange.engine.without_trainer)


SYNCED_CONFIG = "synced_config.yaml"


def train_config_router(engine: EngineState, run_dir: Path, dependencies: list[Depends]) -> APIRouter:
    """The route; writes `synced_config.yaml` in the run's folder."""
    router = APIRouter()

    @router.post("/sync_train_config", dependencies=dependencies)
    async def sync_train_config(  # pyright: ignore[reportUnusedFunction]
        body: SyncTrainConfigRequest, response: Response
    ) -> SyncTrainConfigResponse:
        """Check a training config and keep it. Unknown keys are refused by name (422)."""
        if engine.status != "ENGINE.OFFLINE":
            response.status_code = 409
            error = f"a config is taken only while the engine is ENGINE.OFFLINE; it is {engine.status}"
            return SyncTrainConfigResponse(success=False, error=error)
        try:
            await asyncio.to_thread(_keep, body.yaml_as_string, run_dir / SYNCED_CONFIG)
        except ConfigError as error:
            response.status_code = 422
            return SyncTrainConfigResponse(success=False, error=str(error))
        return SyncTrainConfigResponse(success=True)

    return router


def _keep(text: str, path: Path) -> None:
    parse_config(text, source="yaml_as_string")
    write_atomically(path, text)
