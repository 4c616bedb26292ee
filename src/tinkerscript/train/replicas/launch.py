"""Replicas that the run starts: each with the process that it is."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.processes.launcher import Slot
from tinkerscript.processes.planned import PlannedProcess
from tinkerscript.processes.sampling_servers import KEY, MODEL_NAME
from tinkerscript.processes.supervisor import Child
from tinkerscript.server.auth import ADMIN_TOKEN, read_token
from tinkerscript.train.replicas.replica import Replica
from tinkerscript.vllm_plugin import ADAPTERS_TOKEN


@dataclass(frozen=True)
class LaunchedReplica:
    """A replica and the process that it is."""

    replica: Replica
    child: Child


def launched_replicas(
    planned: Sequence[PlannedProcess], config: RunConfig, *, model: Path, folder: Path, adapters: str
) -> list[LaunchedReplica]:
    """The replicas of a run folder, not started yet.

    `model`: the model's folder; `adapters`: where they find what the run publishes, a folder or its URL.
    """
    key = secrets.token_hex(16)
    inference = config.inference.model_copy(update={"model": MODEL_NAME})
    values: dict[str, str] = {Slot.MODEL: str(model), Slot.ADAPTERS: adapters, Slot.KEY: key}
    admin = read_token(os.environ, ADMIN_TOKEN)
    known = {**os.environ, KEY: key, **({ADAPTERS_TOKEN: admin} if admin else {})}
    found: list[LaunchedReplica] = []
    for process in planned:
        replica = Replica(
            process.name,
            "",
            inference,
            api_key=key,
            timeout_s=config.interchange_server.call_timeout_s,
            is_launched=True,
            adapters=bool(config.engine.lora.rank),
        )
        child = process.child(folder, lambda incarnation: values, known)
        child.on_start = replica.move
        found.append(LaunchedReplica(replica, child))
    return found
