"""`tinkerscript engine`: sampling for a server over its link, or Tinker's protocol over HTTP."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from uuid import uuid4

from rich.console import Console

from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import model_folder
from tinkerscript.tinker_api.process import WireOptions, serve_wire
from tinkerscript.tinker_api.state import WireLimits
from tinkerscript.train.backends.embedded_engine import EmbeddedSampler
from tinkerscript.trainer_link.keys import load_trainer_keys
from tinkerscript.trainer_link.trainer_end import TrainerLink


async def serve_engine(
    checkpoint: str, link_address: str, *, link_keys: Path | None = None, exit_with_parent: bool
) -> int:
    """Sample from a checkpoint for the server behind `link_address`, until cancelled.

    `link_keys` is the folder of the link's keys, if it has some. Raises ConfigError.
    """
    folder = model_folder(checkpoint)
    keys = None if link_keys is None else load_trainer_keys(link_keys)
    with EmbeddedEngine(folder, checkpoint_dir=folder.parent) as engine:
        client = await engine.create_sampling_client()
        link = TrainerLink(
            link_address,
            trainer_id=uuid4().hex,
            model=folder.name,
            sampler=EmbeddedSampler(client, policy_version=0).sample,
            keys=keys,
        )
        async with link:
            link.set_status(policy_version=0, global_step=0, engine_status="ENGINE.ROLLING")
            await (_parent_gone() if exit_with_parent else asyncio.Event().wait())
    return 0


def wire_options(
    checkpoint: str,
    *,
    state_dir: Path,
    name: str,
    host: str,
    port: int,
    threads: int,
    max_batch: int,
    max_runs: int,
    device: str,
    dtype: str,
) -> WireOptions:
    """Raises ConfigError for a folder that is no model's. The model's name is that of its folder, if none is
    given: clients on this machine find its tokenizer by it."""
    folder = model_folder(checkpoint).resolve()
    return WireOptions(
        folder=folder,
        state_dir=state_dir,
        name=name or str(folder),
        host=host,
        port=port,
        threads=threads,
        max_batch=max_batch,
        device=device,
        dtype=dtype,
        limits=WireLimits(runs=max_runs),
    )


async def serve_tinker(options: WireOptions, console: Console, *, exit_with_parent: bool) -> int:
    """Tinker's wire protocol for unmodified clients, until cancelled. Raises ConfigError."""

    def announce(url: str) -> None:
        console.print(
            f"Tinker's protocol at {url}, model {options.name}\n"
            f"sessions and checkpoints in {options.state_dir}\n"
            f"use it  TINKER_BASE_URL={url} TINKER_API_KEY=tml-local python YOUR_PROGRAM.py",
            highlight=False,
            soft_wrap=True,
        )

    if not exit_with_parent:
        await serve_wire(options, announce)
        return 0
    serving = asyncio.create_task(serve_wire(options, announce))
    parent = asyncio.create_task(_parent_gone())
    await asyncio.wait({serving, parent}, return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, parent):
        task.cancel()
    results = await asyncio.gather(serving, parent, return_exceptions=True)
    failed = next((r for r in results if isinstance(r, Exception)), None)
    if failed is not None:
        raise failed
    return 0


async def _parent_gone() -> None:
    """Return when standard input, a pipe from the parent, reaches its end."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while await reader.read(4096):
        pass
