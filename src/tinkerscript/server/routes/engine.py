"""The endpoints of the engine: sync a training config, start a trainer with it, stop it.

Invariants: at most one trainer is started; it joins this server over the link like any other, resumes the run
in the folder, and is asked to end when the server shuts down. A config is accepted only while the engine is
OFFLINE; its YAML is parsed safely and runs nothing. All routes need the admin role.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from pathlib import Path

from fastapi import APIRouter, Response

from tinkerscript.config import parse_config
from tinkerscript.errors import ConfigError, ConflictError
from tinkerscript.files import write_atomically
from tinkerscript.protocol import (
    StartEngineRequest,
    SuccessResponse,
    SyncTrainConfigRequest,
    SyncTrainConfigResponse,
)
from tinkerscript.server.interchange import Interchange
from tinkerscript.trainer_link.messages import Stop
from tinkerscript.trainer_link.server_end import ServerLink

logger = logging.getLogger(__name__)


TRAINER_LOG = "trainer.log"
SYNCED_CONFIG = "synced_config.yaml"

ENDING_S = 30.0
"""Seconds that `/start_engine` waits for a stopping trainer to end."""


class EngineRoutes:
    """The routes of the engine, and the trainer that they started. `run` watches and ends it."""

    def __init__(self, run_dir: Path, *, interchange: Interchange, link: ServerLink) -> None:
        self._run_dir = run_dir
        self._interchange = interchange
        self._link = link
        self._trainer: Process | None = None
        self._starting = asyncio.Lock()
        self._started = asyncio.Event()
        self._stopping = False
        self._ended = asyncio.Event()

    def router(self) -> APIRouter:
        """All routes; they need the admin role."""
        router = APIRouter(tags=["engine"])
        router.post("/sync_train_config")(self.sync_train_config)
        router.post("/start_engine")(self.start_engine)
        router.post("/stop_engine")(self.stop_engine)
        return router

    async def sync_train_config(
        self, body: SyncTrainConfigRequest, response: Response
    ) -> SyncTrainConfigResponse:
        """Check a training config and keep it. Unknown keys are refused by name (422)."""
        status = self._interchange.engine.status
        if status != "ENGINE.OFFLINE":
            response.status_code = 409
            error = f"a config is accepted only while the engine is ENGINE.OFFLINE; it is {status}"
            return SyncTrainConfigResponse(success=False, error=error)
        try:
            await asyncio.to_thread(_keep, body.yaml_as_string, self._run_dir / SYNCED_CONFIG)
        except ConfigError as error:
            response.status_code = 422
            return SyncTrainConfigResponse(success=False, error=str(error))
        return SyncTrainConfigResponse(success=True)

    async def start_engine(self, body: StartEngineRequest) -> SuccessResponse:
        """Start a trainer with the config of `/sync_train_config`. Its output goes to logs/trainer.log.

        Waits up to 30 s for a trainer that is stopping.
        """
        async with self._starting:
            if self._stopping and self._trainer is not None:
                await self._end_of_trainer()
            if self._trainer_is_there:
                raise ConflictError("a trainer is connected already; stop it with /stop_engine")
            if self._trainer is not None:
                raise ConflictError(f"a trainer is running already (process {self._trainer.pid})")
            config = self._run_dir / SYNCED_CONFIG
            if not config.exists():
                raise ConflictError("there is no training config: POST /sync_train_config first")
            self._trainer = await self._spawn(config)
            self._stopping = False
            self._ended.clear()
        self._interchange.set_status("ENGINE.BOOTING")
        self._started.set()
        return SuccessResponse(success=True)

    async def stop_engine(self) -> SuccessResponse:
        """Ask the connected trainer to end its run in order. The run can be resumed."""
        if self._link.connected:
            self._link.send(Stop(reason="/stop_engine"))
        elif self._trainer is not None:
            self._trainer.terminate()
        else:
            raise ConflictError("no trainer is connected")
        self._stopping = True
        return SuccessResponse(success=True)

    async def run(self) -> None:
        """Watch each started trainer until cancelled; then ask a running one to end."""
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
        """A trainer that reported OFFLINE is leaving."""
        return self._link.connected and self._interchange.engine.status != "ENGINE.OFFLINE"

    async def _end_of_trainer(self) -> None:
        """Return when the trainer has ended, or after ENDING_S."""
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


def _keep(text: str, path: Path) -> None:
    parse_config(text, source="yaml_as_string")
    write_atomically(path, text)
