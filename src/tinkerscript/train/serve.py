"""Serving without training: a model, or the interchange server of a run whose trainer comes by itself.

`serve_checkpoint` supervises the server and `tinkerscript engine`, `serve_run` the server alone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from datetime import datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from tinkerscript.config import (
    EngineConfig,
    InterchangeConfig,
    RunConfig,
    dump_config,
    load_config,
    model_folder,
)
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.errors import ConfigError
from tinkerscript.server.link_keys import load_trainer_keys
from tinkerscript.server.train_config import write_atomically
from tinkerscript.server.trainer_link import TrainerLink
from tinkerscript.train.policy import sample_from
from tinkerscript.train.processes import ServerAddress, server_address, server_child
from tinkerscript.train.run_folder import new_folder
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
            await supervisor.start(engine_child(folder, address, run_dir))
            console.print(f"serving {folder.name!r} at {address.url}/v1", highlight=False)
            await supervisor.failed()
    return 0


async def serve_run(path: Path | None, resume: Path | None, console: Console) -> int:
    """Serve a new run folder of the config at `path`, or again the one at `resume`, until cancelled.

    Raises ConfigError.
    """
    if (path is None) == (resume is None):
        raise ConfigError("give one of CONFIG, --resume RUN_DIR and --checkpoint DIR")
    config = load_config(path or (resume or Path()) / "config.yaml")
    folder = resume or new_folder(config, datetime.now())
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    if resume is None:
        write_atomically(folder / "config.yaml", dump_config(config))
    async with Supervisor(max_restarts=config.workers.max_restarts, note=console.print) as supervisor:
        server = server_child(folder)
        await supervisor.start(server)
        address = await server_address(folder, server, supervisor)
        console.print(
            f"interchange server at {address.url}, run folder {folder}\n"
            f"train with it    tinkerscript train CONFIG --join {folder}\n"
            f"or let it train  POST /sync_train_config, then /start_engine\n"
            f"run episodes     tinkerscript worker SCRIPT --server {address.url}",
            highlight=False,
            soft_wrap=True,
        )
        await supervisor.failed()
    return 0


def engine_child(folder: Path, address: ServerAddress, run_dir: Path) -> Child:
    """`tinkerscript engine` for a server's link."""

    def argv(_: int) -> list[str]:
        command = [sys.executable, "-m", "tinkerscript", "engine", "--checkpoint", str(folder)]
        keys = ["--link-keys", str(address.link_keys)] if address.link_keys else []
        return [*command, "--link", address.link_address, *keys, "--exit-with-parent"]

    return Child("engine", argv, run_dir / "logs" / "engine.log")


async def serve_engine(
    checkpoint: Path, link_address: str, *, link_keys: Path | None = None, exit_with_parent: bool
) -> int:
    """Sample from a checkpoint for the server behind `link_address`, until cancelled.

    `link_keys` is the folder of the link's keys, if it has some. Raises ConfigError.
    """
    folder = model_folder(str(checkpoint))
    keys = None if link_keys is None else load_trainer_keys(link_keys)
    with EmbeddedEngine(folder, checkpoint_dir=folder.parent) as engine:
        client = await engine.create_sampling_client()
        link = TrainerLink(
            link_address,
            trainer_id=uuid4().hex,
            model=folder.name,
            sampler=partial(sample_from, client, 0),
            keys=keys,
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
