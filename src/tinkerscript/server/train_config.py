"""`/sync_train_config`: a config that a client hands in, checked against the models and kept for the engine.

Invariant: YAML is parsed safely and runs nothing; a config is taken only while the engine is OFFLINE.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.params import Depends

from tinkerscript.config import parse_config
from tinkerscript.errors import ConfigError
from tinkerscript.files import write_atomically
from tinkerscript.protocol import SyncTrainConfigRequest, SyncTrainConfigResponse
from tinkerscript.server.interchange import EngineState

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
