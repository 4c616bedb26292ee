"""Endpoints of the engine, which need the admin role.

At most one trainer is started. It joins over the link, resumes the folder's run, and stops with the server.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Response
from fastapi import Path as InPath
from fastapi.responses import FileResponse

from tinkerscript.addresses import ADAPTERS_FOLDER
from tinkerscript.config import parse_config
from tinkerscript.errors import ConfigError, ConflictError, UnknownWeightsError
from tinkerscript.files import write_atomically
from tinkerscript.lifecycle import INTERRUPTED
from tinkerscript.protocol import (
    StartEngineRequest,
    SuccessResponse,
    SyncTrainConfigRequest,
    SyncTrainConfigResponse,
)
from tinkerscript.server.interchange import Interchange
from tinkerscript.trainer_link.messages import Stop
from tinkerscript.trainer_link.server_end import ServerLink

AdapterName = Annotated[str, InPath(description="Name of the adapter, `policy-<run>-<version>-<digest>`.")]
AdapterFile = Annotated[str, InPath(description="A file of it, such as `adapter_model.safetensors`.")]

logger = logging.getLogger(__name__)


TRAINER_LOG = "trainer.log"
SYNCED_CONFIG = "synced_config.yaml"

TRAIN_COMMAND = (sys.executable, "-m", "tinkerscript", "train")
LOG_TAIL_BYTES = 65_536

ENDING_S = 30.0  # For a trainer to stop.


class EngineRoutes:
    def __init__(
        self,
        run_dir: Path,
        *,
        interchange: Interchange,
        link: ServerLink,
        trainer: Sequence[str] = TRAIN_COMMAND,
        ending_s: float = ENDING_S,
    ) -> None:
        """`trainer` is called with a config, `--join` and the run's folder."""
        self._run_dir = run_dir
        self._command = trainer
        self._ending_s = ending_s
        self._interchange = interchange
        self._link = link
        self._trainer: Process | None = None
        self._starting = asyncio.Lock()
        self._started = asyncio.Event()
        self._stopping = False
        self._ended = asyncio.Event()
        self._log_begins = 0

    def router(self) -> APIRouter:
        router = APIRouter(tags=["engine"])
        router.post("/sync_train_config")(self.sync_train_config)
        router.post("/start_engine")(self.start_engine)
        router.post("/stop_engine")(self.stop_engine)
        router.get("/adapters/{name}/{file}", response_class=FileResponse)(self.adapter)
        return router

    async def adapter(self, name: AdapterName, file: AdapterFile) -> FileResponse:
        """Download a file of a published adapter, for replicas that do not share the run's folder."""
        folder = (self._run_dir / ADAPTERS_FOLDER).resolve()
        path = (folder / name / file).resolve()
        if path.parent.parent != folder or not path.is_file():
            raise UnknownWeightsError(f"this run has no {file!r} of weights {name!r}")
        return FileResponse(path, media_type="application/octet-stream")

    async def sync_train_config(
        self, body: SyncTrainConfigRequest, response: Response
    ) -> SyncTrainConfigResponse:
        """Validate and store a training config while the engine is OFFLINE. Refuses unknown keys (422)."""
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

        Waits up to 30 s for a stopping trainer, or with `force_restart` for a running one.
        """
        async with self._starting:
            if body.force_restart:
                await self._end_by_force()
            elif self._stopping and self._trainer is not None:
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
            self._interchange.trainer_starts()
        self._started.set()
        return SuccessResponse(success=True)

    async def stop_engine(self) -> SuccessResponse:
        """Ask the trainer to end its run in order. The run can be resumed."""
        if self._link.connected:
            self._link.send(Stop(reason="/stop_engine"))
        elif self._trainer is not None:
            self._trainer.terminate()
        else:
            raise ConflictError("no trainer is connected")
        self._stopping = True
        return SuccessResponse(success=True)

    async def run(self) -> None:
        try:
            while True:
                await self._started.wait()
                self._started.clear()
                await self._watch()
        finally:
            if self._trainer is not None and self._trainer.returncode is None:
                self._trainer.terminate()

    async def _spawn(self, config: Path) -> Process:
        log = self._log
        log.parent.mkdir(exist_ok=True)
        self._log_begins = log.stat().st_size if log.exists() else 0
        command = [*self._command, str(config), "--join", str(self._run_dir)]
        with log.open("ab") as file:
            return await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def _trainer_is_there(self) -> bool:
        """A trainer that reported OFFLINE is about to disconnect."""
        return self._link.connected and self._interchange.engine.status != "ENGINE.OFFLINE"

    async def _end_by_force(self) -> None:
        if self._link.connected or self._trainer is not None:
            await self.stop_engine()
        if (trainer := self._trainer) is not None:
            await self._end_of_trainer()
            if not self._ended.is_set():
                logger.warning("trainer.killed pid=%d", trainer.pid)
                trainer.kill()
                await self._ended.wait()
        if self._trainer_is_there:  # Started by hand, so there is no process to kill.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._ending_s):
                    await self._interchange.offline()

    async def _end_of_trainer(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._ending_s):
                await self._ended.wait()

    async def _watch(self) -> None:
        assert self._trainer is not None
        code = await self._trainer.wait()
        logger.info("trainer.ended code=%d log=%s", code, self._log)
        self._trainer = None
        self._ended.set()
        failed = code not in (0, INTERRUPTED) and not self._stopping
        self._interchange.engine.booting = False
        if not self._link.connected or failed:
            self._interchange.trainer_gone(self._why_it_failed(code) if failed else "")

    @property
    def _log(self) -> Path:
        return self._run_dir / "logs" / TRAINER_LOG

    def _why_it_failed(self, code: int) -> str:
        with self._log.open("rb") as file:
            file.seek(max(self._log_begins, self._log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if line.startswith("error:")]
        reason = (errors or said or ["it wrote nothing"])[-1]
        return f"the trainer ended with exit code {code}: {reason[:1000]} (see {self._log.name} in logs/)"


def _keep(text: str, path: Path) -> None:
    parse_config(text, source="yaml_as_string")
    write_atomically(path, text)
