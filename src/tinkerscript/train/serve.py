"""Serving a trained model: the interchange server with an engine in the trainer's place.

`serve_checkpoint` supervises two processes, the server and `tinkerscript engine`; neither trains.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from tinkerscript.config import EngineConfig, InterchangeConfig, RunConfig, dump_config, model_folder
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.server.trainer_link import TrainerLink
from tinkerscript.train.policy import sample_from
from tinkerscript.train.processes import server_address, server_child
from tinkerscript.train.supervisor import Child, Supervisor

MAX_RESTARTS = 10


async def serve_checkpoint(checkpoint: Path, host: str, port: int, console: Console) -> int:
    """Serve until cancelled. Raises ConfigError for a folder that holds no model, or a port in use."""
    folder = model_folder(str(checkpoint))
    config = RunConfig(
        engine=EngineConfig(model=str(folder.absolute())),
        interchange_server=InterchangeConfig(interchange_server_host=host, interchange_server_port=port),
    )
    with tempfile.TemporaryDirectory(prefix="tinkerscript-serve-") as name:
        run_dir = Path(name)
        (run_dir / "logs").mkdir()
        (run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        async with Supervisor(max_restarts=MAX_RESTARTS, note=console.print) as supervisor:
            server = server_child(run_dir, serve_model=True)
            await supervisor.start(server)
            address = await server_address(run_dir, server, supervisor)
            await supervisor.start(engine_child(folder, address.link_address, run_dir))
            console.print(f"serving {folder.name!r} at {address.url}/v1", highlight=False)
            await supervisor.failed()
    return 0


def engine_child(folder: Path, link_address: str, run_dir: Path) -> Child:
    """`tinkerscript engine` for a server's link."""

    def argv(_: int) -> list[str]:
        command = [sys.executable, "-m", "tinkerscript", "engine", "--checkpoint", str(folder)]
        return [*command, "--link", link_address, "--exit-with-parent"]

    return Child("engine", argv, run_dir / "logs" / "engine.log")


async def serve_engine(checkpoint: Path, link_address: str, *, exit_with_parent: bool) -> int:
    """Sample from a checkpoint for the server behind `link_address`, until cancelled."""
    folder = model_folder(str(checkpoint))
    with EmbeddedEngine(folder, checkpoint_dir=folder.parent) as engine:
        client = await engine.create_sampling_client()
        link = TrainerLink(
            link_address, trainer_id=uuid4().hex, model=folder.name, sampler=partial(sample_from, client, 0)
        )
        async with link:
            link.set_status(policy_version=0, global_step=0, engine_status="ENGINE.ROLLING")
            await (_parent_gone() if exit_with_parent else asyncio.Event().wait())
    return 0


async def _parent_gone() -> None:
    """Return when standard input, a pipe from the parent, reaches its end."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while await reader.read(4096):
        pass
